"""Low-rank adapters on a causal LM's linear layers (Hu et al. 2021, arXiv 2106.09685).

The model is frozen in its own dtype; adapters are fp32, rounded to that dtype where they compute, A
begun as PEFT begins it and B at zero, so that the first version is the model itself.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.lora import LoraConfig
from learner.errors import BadModel
from weight_sync.adapter import layer_in_a_block


class _Rounded(nn.Linear):  # type: ignore[misc]
    """A layer whose weights are rounded to its inputs' dtype: fp32 products of bf16 inputs took
    longer than the layer that they are added to.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight.to(inputs.dtype))


class LoraLinear(nn.Linear):  # type: ignore[misc]
    """y = W x + b + scale · B A x; W and b are the very parameters of the layer it replaces."""

    def __init__(
        self, base: nn.Linear, config: LoraConfig, generator: torch.Generator | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.scale = base.weight, base.bias, config.scale
        self.lora_A = _Rounded(base.in_features, config.rank, bias=False, dtype=torch.float32)
        self.lora_B = _Rounded(config.rank, base.out_features, bias=False, dtype=torch.float32)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., out] of [..., in], all of it in the base's dtype, as an engine computes it."""
        made = functional.linear(inputs, self.weight, self.bias)
        return made.add_(self.lora_B(self.lora_A(inputs)), alpha=self.scale)

    def merged(self) -> Tensor:
        """W + scale · B A, in fp32."""
        with torch.no_grad():
            return merge(self.weight, self.lora_A.weight, self.lora_B.weight, self.scale)


def merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """W + scale · B A [out, in], in fp32, from W [out, in], A [rank, in] and B [out, rank]."""
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale)


def adapt(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze the model and put adapters on its layers, the same ones whoever does it with this
    seed. Raises BadModel for layers that are not there.
    """
    model.requires_grad_(False)
    layers = dict(_layers(model))
    there = sorted({_last(path) for path in layers})
    if missing := [name for name in config.layers if name not in there]:
        raise BadModel(
            f"learner.lora.layers names {missing[0]!r}, which no linear layer of the model's "
            f"blocks is called: they are {', '.join(there)}"
        )
    if not layers:
        raise BadModel(
            f"learner.lora.rank = {config.rank!r}: no layer of the model's blocks is a linear one "
            "(torch.nn.Linear): train it whole, learner.lora.rank=0"
        )
    generator = torch.Generator().manual_seed(seed)
    for path, layer in layers.items():
        if not config.layers or _last(path) in config.layers:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LoraLinear(layer, config, generator))


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by their path in the model."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of the blocks, by path."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and layer_in_a_block(path):
            yield path, module


def _last(path: str) -> str:
    return path.rpartition(".")[2]

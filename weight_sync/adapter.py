"""A LoRA adapter on its way into an engine: its names, its scale, and who takes which."""

import re
from typing import TYPE_CHECKING

from configs.runtime.files import weights_digest
from configs.schema import Config
from weight_sync.protocol import Adapter, ManifestMismatch

if TYPE_CHECKING:  # whoever starts an engine needs no torch
    import torch

PREFIX = "base_model.model."  # of PEFT's names
_IN_A_BLOCK = re.compile(r"(?:.*\.)?\d+\.(?:.*\.)?(\w+)")  # of a layer's path: the last part
FIELDS = {name: f"learner.lora.{name}" for name in ("rank", "alpha", "layers")} | {
    "base": "digest of the weights in model.path"
}


def adapter_of(config: Config) -> Adapter | None:
    """What the learner publishes in place of the whole model's weights; None where it does not.
    Reads these once, for their digest.
    """
    lora = config.learner.lora
    if not lora.rank or lora.publish != "adapter":
        return None
    base = weights_digest(config.model.path) if config.model.path else ""
    return Adapter(lora.rank, lora.alpha, tuple(lora.layers), base)


def layer_in_a_block(path: str) -> str:
    """The last part of a layer's path in a model, such as q_proj, where it lies in a block; else
    nothing.
    """
    found = _IN_A_BLOCK.fullmatch(path)
    return found[1] if found else ""


def weight_in_a_block(name: str) -> str:
    """The same of the name of a layer's weight; of another parameter's nothing."""
    path = name.removesuffix(".weight")
    return layer_in_a_block(path) if path != name else ""


def names_of(layer: str) -> tuple[str, str]:
    """PEFT's names of a layer's A and B."""
    return f"{PREFIX}{layer}.lora_A.weight", f"{PREFIX}{layer}.lora_B.weight"


def scaled(b: "torch.Tensor", adapter: Adapter) -> "torch.Tensor":
    """B times the scale, which engines compute with: in fp32, rounded once to B's dtype."""
    return (b.float() * adapter.scale).to(b.dtype)


def require_adapter(sent: Adapter | None, own: Adapter | None) -> None:
    """Raise ManifestMismatch, naming the fields, where an engine takes other tensors than those
    that the learner sends.
    """
    if sent == own:
        return
    if sent is None or own is None:
        learner, actor = ("an adapter" if each else "whole weights" for each in (sent, own))
        raise ManifestMismatch(
            f"learner.lora: the learner sends {learner}, this actor's engine takes {actor}: start "
            "both with the same learner.lora.rank and learner.lora.publish"
        )
    wrong = [
        f"{field}: learner {getattr(sent, name)!r}, actor {getattr(own, name)!r}"
        for name, field in FIELDS.items()
        if getattr(sent, name) != getattr(own, name)
    ]
    raise ManifestMismatch("; ".join(wrong))

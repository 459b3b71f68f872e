"""The one LoRA slot of a vLLM worker: written in place as weights are, and read back.

vLLM's own way to an adapter is a folder on a disk, by a name that it keeps once it has read it; an
adapter that lacks a layer, or a request that names none, is computed as the base without a word.
Here the slot's buffers are written by vLLM's own `set_lora`, which cuts a worker's shard out, and
compared afterwards with what has arrived: every slice of every layer, those not adapted (zero) too.
The base must stay as it was loaded, and every request must have named the adapter. Knows vLLM's
manager by its attributes alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from weight_sync import buckets
from weight_sync.adapter import names_of, scaled
from weight_sync.protocol import ADAPTER_ID, Adapter, EngineDiffers, VerificationFailed

_SHOWN = 3  # names in a message
Sizes = Callable[[torch.nn.Module], list[int]]


class AdapterSlot:
    """The adapter of a model with vLLM's `manager` of LoRA. `sizes(layer)` gives a layer's rows
    over all workers, part by part.
    """

    def __init__(self, model: torch.nn.Module, manager: Any, adapter: Adapter, sizes: Sizes):
        """Raises EngineDiffers where a layer of the adapter is none of the engine's."""
        self._model, self._manager, self._sizes = model, manager, sizes
        self.adapter = adapter
        self._slot = manager.lora_index_to_id.index(ADAPTER_ID)
        self._unnamed = 0  # requests that ran without the adapter since the last load
        self._base = _base_sums(model)
        found = {
            part.rpartition(".")[2] for layer in manager.modules for part in self._parts(layer)
        }
        if missing := sorted(set(adapter.layers) - found):
            has = ", ".join(sorted(found)) or "none"
            raise EngineDiffers(
                f"learner.lora.layers names {missing[0]!r}, which vLLM's {type(model).__name__} "
                f"cannot adapt; it adapts {has}"
            )

    def layout(self) -> buckets.Layout:
        """Names, shapes and dtype of the adapter's tensors, whole, as PEFT has them."""
        layout: buckets.Layout = {}
        rank = self.adapter.rank
        for path, layer in self._manager.modules.items():
            base, dtype = layer.base_layer, buckets.dtype_name(layer.lora_a_stacked[0].dtype)
            parts = self._parts(path)
            sizes = self._sizes(base) or [base.output_size]
            if len(parts) == 1:
                sizes = [sum(sizes)]
            for part, rows in zip(parts, sizes, strict=True):
                if self._adapts(part):
                    a, b = names_of(part)
                    layout |= {a: ((rank, base.input_size), dtype), b: ((rows, rank), dtype)}
        return layout

    def load(self, named_tensors: buckets.NamedTensors) -> None:
        """Write a version into the slot, its B times the scale."""
        tensors, self._unnamed = dict(named_tensors), 0
        for path, layer in self._manager.modules.items():
            a, b = self._given(path, tensors)
            if len(a) > 1:
                layer.set_lora(self._slot, a, b)
            elif a[0] is not None:
                layer.set_lora(self._slot, a[0], b[0])

    def checksum(self, named_tensors: buckets.NamedTensors) -> str:
        """The checksum of what the slot and the base hold. Raises VerificationFailed where that is
        not the version that has arrived, on what was loaded at the start.
        """
        if self._manager.lora_index_to_id[self._slot] != ADAPTER_ID:
            raise VerificationFailed("the adapter is no longer in the engine's slot")
        wrong, held = [], []
        for name, buffer, own in self._pairs(dict(named_tensors)):
            held.append(buffer)
            if not torch.equal(buffer, _filled(own, buffer)):
                wrong.append(name)
        if wrong:
            raise VerificationFailed(
                f"the engine does not hold the adapter that has arrived: {len(wrong)} of "
                f"{len(held)} tensors differ: {', '.join(wrong[:_SHOWN])}"
            )
        return f"{self._require_base()}-{buckets.digest(map(_bytes, held))}"

    def _require_base(self) -> str:
        """Return the sum of the base's weights; raise VerificationFailed where it has changed."""
        sums = _base_sums(self._model)
        if changed := sorted(name for name in sums if sums[name] != self._base[name]):
            raise VerificationFailed(
                "the base under the adapter is not what the engine has loaded from model.path: "
                f"{len(changed)} of {len(sums)} weights have changed: {', '.join(changed[:_SHOWN])}"
            )
        return buckets.digest([_bytes(torch.tensor([sums[name] for name in sorted(sums)]))])

    def note(self, prompts: Sequence[int]) -> None:
        """Count the requests of a batch that name no adapter (0), by the ids that they name."""
        self._unnamed += sum(each != ADAPTER_ID for each in prompts)

    def require_named(self) -> None:
        """Raise VerificationFailed where a request has run without the adapter since the load."""
        if self._unnamed:
            raise VerificationFailed(
                f"{self._unnamed} requests were computed by the base: they did not name the adapter"
            )

    def _parts(self, path: str) -> Sequence[str]:
        """The layers of the checkpoint that vLLM has fused into this one."""
        parts: Sequence[str] = self._manager.packed_modules.get(path) or [path]
        return parts

    def _adapts(self, part: str) -> bool:
        layers = self.adapter.layers
        return not layers or part.rpartition(".")[2] in layers

    def _pairs(
        self, tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Each of the slot's buffers by PEFT's name, and what a version has for it, if anything."""
        for path, layer in self._manager.modules.items():
            own = _shards(layer, *self._given(path, tensors))
            for number, part in enumerate(self._parts(path)):
                a, b = names_of(part)
                yield a, layer.lora_a_stacked[number][self._slot, 0], own[0][number]
                yield b, layer.lora_b_stacked[number][self._slot, 0], own[1][number]

    def _given(
        self, path: str, tensors: dict[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """A version's A and scaled B for each part of a layer, whole; None where not adapted."""
        names = [names_of(part) if self._adapts(part) else None for part in self._parts(path)]
        a = [tensors[each[0]] if each else None for each in names]
        return a, [scaled(tensors[each[1]], self.adapter) if each else None for each in names]


def _shards(layer: Any, a: list[Any], b: list[Any]) -> tuple[list[Any], list[Any]]:
    """A worker's own parts of a layer's tensors, as its `set_lora` cuts them out."""
    if layer.tp_size == 1:
        return a, b
    if len(a) > 1:
        return layer.slice_lora_a(a), layer.slice_lora_b(b)
    return [layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])]


def _filled(own: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """What a buffer must hold: the tensor, and zeros beyond its rank, or nothing but zeros."""
    if own is None:
        return torch.zeros_like(like)
    rows, columns = (room - size for room, size in zip(like.shape, own.shape, strict=True))
    return functional.pad(own.to(like), (0, columns, 0, rows))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _base_sums(model: torch.nn.Module) -> dict[str, int]:
    """The sum of each parameter's words as integers, which any single change changes: made where
    the weights lie, it costs a pass over them, not their way through the host.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: int(each.detach().view(words[each.element_size()]).sum(dtype=torch.int64))
        for name, each in model.named_parameters()
    }

"""What a slot holds against what has arrived, around layers that keep adapters as vLLM's do."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_sync import buckets
from weight_sync.adapter import names_of
from weight_sync.adapter_slot import AdapterSlot
from weight_sync.protocol import ADAPTER_ID, Adapter, EngineDiffers, VerificationFailed

RANK, ROOM, WIDTH = 2, 4, 6  # the slot's rank is larger than the adapter's
PARTS = {"layers.0.qkv_proj": (4, 2, 2), "layers.0.o_proj": (6,)}
ADAPTER = Adapter(RANK, 3.0, ("q_proj", "v_proj", "o_proj"))


class Layer:
    """A linear layer of one worker, of fused parts."""

    tp_size = 1

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.base_layer = SimpleNamespace(input_size=WIDTH, output_size=sum(rows))
        self.lora_a_stacked = tuple(torch.zeros(1, 1, ROOM, WIDTH) for _ in rows)
        self.lora_b_stacked = tuple(torch.zeros(1, 1, each, ROOM) for each in rows)

    def set_lora(self, slot: int, a: Any, b: Any) -> None:
        a, b = (each if isinstance(each, list) else [each] for each in (a, b))
        for buffer, own in zip((*self.lora_a_stacked, *self.lora_b_stacked), (*a, *b), strict=True):
            buffer.zero_()
            if own is not None:
                buffer[slot, 0, : own.shape[0], : own.shape[1]] = own


@pytest.fixture
def slot() -> AdapterSlot:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    packed = {"layers.0.qkv_proj": [f"layers.0.{each}_proj" for each in "qkv"]}
    layers = {path: Layer(rows) for path, rows in PARTS.items()}
    manager = SimpleNamespace(modules=layers, packed_modules=packed, lora_index_to_id=[ADAPTER_ID])
    sizes = {id(layer.base_layer): PARTS[path] for path, layer in layers.items()}
    return AdapterSlot(model, manager, ADAPTER, lambda base: list(sizes[id(base)]))


def version(slot: AdapterSlot, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layout = slot.layout().items()
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in layout}


def test_the_layout_is_peft_s_of_the_layers_asked_for(slot: AdapterSlot) -> None:
    expected: buckets.Layout = {}
    for layer, rows in (("q_proj", 4), ("v_proj", 2), ("o_proj", 6)):
        a, b = names_of(f"layers.0.{layer}")
        expected |= {a: ((RANK, WIDTH), "float32"), b: ((rows, RANK), "float32")}
    assert slot.layout() == expected


def test_a_slot_holds_a_and_b_times_the_scale_and_zeros_beyond(slot: AdapterSlot) -> None:
    first, second = version(slot, 1), version(slot, 2)
    sums = []
    for tensors in (first, second, first):
        slot.load(tensors.items())
        sums.append(slot.checksum(tensors.items()))
    assert sums[0] == sums[2] != sums[1]
    layer = slot._manager.modules["layers.0.qkv_proj"]
    a, b = names_of("layers.0.v_proj")
    assert torch.equal(layer.lora_a_stacked[2][0, 0, :RANK], first[a])
    assert torch.equal(layer.lora_b_stacked[2][0, 0, :, :RANK], 1.5 * first[b])
    assert not layer.lora_b_stacked[1].any() and not layer.lora_a_stacked[2][0, 0, RANK:].any()


def of(slot: AdapterSlot, path: str = "layers.0.qkv_proj") -> Any:
    return slot._manager.modules[path]


Change = Callable[[AdapterSlot], Any]
FAULTS: dict[str, tuple[Change, str]] = {
    "another alpha": (
        lambda slot: of(slot, "layers.0.o_proj").lora_b_stacked[0].mul_(2.0),
        r"1 of 8 tensors differ: base_model.model.layers.0.o_proj.lora_B.weight$",
    ),
    "one layer missing": (
        lambda slot: [
            each[2].zero_() for each in (of(slot).lora_a_stacked, of(slot).lora_b_stacked)
        ],
        r"2 of 8 tensors differ: \S+v_proj.lora_A.weight, \S+v_proj.lora_B.weight$",
    ),
    "stale": (lambda slot: slot.load(version(slot, 0).items()), "6 of 8 tensors differ"),
    "where nothing is adapted": (
        lambda slot: of(slot).lora_b_stacked[1].fill_(1.0),
        r"1 of 8 tensors differ: \S+k_proj.lora_B",
    ),
    "beyond the rank": (
        lambda slot: of(slot).lora_a_stacked[0][0, 0, RANK:].fill_(1.0),
        r"1 of 8 tensors differ: \S+q_proj.lora_A",
    ),
    "delivered to the base": (
        lambda slot: slot._model.weight.data[0, 0].add_(1e-6),
        r"loaded from model.path: 1 of 2 weights have changed: weight$",
    ),
    "out of its slot": (
        lambda slot: slot._manager.lora_index_to_id.__setitem__(0, None),
        "no longer in the engine's slot",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_what_has_arrived_is_named(slot: AdapterSlot, fault: str) -> None:
    change, said = FAULTS[fault]
    tensors = version(slot, 1)
    slot.load(tensors.items())
    change(slot)
    with pytest.raises(VerificationFailed, match=said):
        slot.checksum(tensors.items())


def test_a_request_that_does_not_name_the_adapter_is_told_until_the_next_load(
    slot: AdapterSlot,
) -> None:
    slot.load(version(slot, 1).items())
    slot.note([ADAPTER_ID, ADAPTER_ID])
    slot.require_named()
    slot.note([ADAPTER_ID, 0])
    with pytest.raises(VerificationFailed, match="1 requests were computed by the base"):
        slot.require_named()
    slot.load(version(slot, 2).items())
    slot.require_named()


def test_a_layer_that_the_engine_cannot_adapt_is_named(slot: AdapterSlot) -> None:
    asked = Adapter(RANK, 3.0, ("o_proj", "w1"))
    with pytest.raises(
        EngineDiffers, match=r"'w1', which vLLM's Linear cannot adapt; it adapts k_"
    ):
        AdapterSlot(slot._model, slot._manager, asked, slot._sizes)

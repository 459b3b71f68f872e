"""What a learner and an engine must say alike of an adapter before its bytes are sent."""

import asyncio

import msgspec
import pytest
import torch

from configs.load import parse
from tests.weight_sync.conftest import CONFIG, PROBE, Fleet, score
from weight_sync import buckets
from weight_sync.adapter import (
    adapter_of,
    layer_in_a_block,
    names_of,
    require_adapter,
    scaled,
    weight_in_a_block,
)
from weight_sync.protocol import (
    Adapter,
    ManifestMismatch,
    VerificationFailed,
    WeightManifest,
    decode_manifest,
    encode,
)
from weight_sync.publisher import Publisher
from weight_sync.receiver import Receiver

OWN = Adapter(rank=8, alpha=16.0, layers=("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (None, r"the learner sends whole weights, this actor's engine takes an adapter: .*\.rank"),
        (Adapter(8, 32.0, OWN.layers), r"^learner.lora.alpha: learner 32.0, actor 16.0$"),
        (Adapter(4, 16.0, OWN.layers), r"^learner.lora.rank: learner 4, actor 8$"),
        (Adapter(8, 16.0, ("q_proj",)), r"^learner.lora.layers: learner \('q_proj',\), actor \("),
    ],
)
def test_another_adapter_is_refused_by_the_field_that_differs(
    sent: Adapter | None, said: str
) -> None:
    with pytest.raises(ManifestMismatch, match=said):
        require_adapter(sent, OWN)
    require_adapter(OWN, Adapter(8, 16.0, ("q_proj", "v_proj")))
    require_adapter(None, None)
    with pytest.raises(
        ManifestMismatch, match=r"^digest of the weights in model.path: learner 'a'"
    ):
        require_adapter(msgspec.structs.replace(OWN, base="a"), OWN)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["learner.lora.rank=4", "learner.lora.publish=merged"], None),
        (["learner.lora.rank=4", "learner.lora.alpha=8"], Adapter(4, 8.0, ())),
        (["learner.lora.rank=4", "learner.lora.layers=[q_proj]"], Adapter(4, 32.0, ("q_proj",))),
    ],
)
def test_an_adapter_is_published_where_the_configuration_says_so(
    overrides: list[str], expected: Adapter | None
) -> None:
    assert adapter_of(parse("", overrides, "test")) == expected


def test_names_are_peft_s_and_the_scale_is_rounded_once() -> None:
    layer = "model.layers.0.self_attn.q_proj"
    assert names_of(layer) == (
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
    )
    b = torch.randn(6, 8).bfloat16()
    assert torch.equal(scaled(b, Adapter(8, 12.0, ())), (b.float() * 1.5).bfloat16())


def test_the_manifest_of_a_version_says_which_adapter_it_is_of() -> None:
    manifest = WeightManifest(1, 0, (), (), "", (), (), 1e-3, adapter=OWN)
    assert decode_manifest(encode(manifest)) == manifest


async def test_an_engine_of_another_alpha_refuses_what_it_is_sent(
    fleet: Fleet, endpoint: str
) -> None:
    engine = fleet.add("actor-0")
    engine.receiver = Receiver(engine._layout, engine._load, engine._checksum, adapter=OWN)
    sent = Adapter(8, 32.0, OWN.layers)
    with Publisher(CONFIG, 1, 7, endpoint, adapter=sent) as publisher:
        fleet.publish(publisher, 0)
        with pytest.raises(ManifestMismatch, match=r"alpha: learner 32.0, actor 16.0 \(actor-0"):
            await asyncio.to_thread(publisher.wait_applied, 0, 20)
    assert "apply" not in engine.calls


async def test_a_checksum_that_is_refused_has_the_version_sent_anew(
    fleet: Fleet, endpoint: str
) -> None:
    """What an engine holds is compared with what has arrived, once, and is right the next time;
    before that it serves nothing.
    """
    engine, seen, serving = fleet.add("actor-0"), [], []

    def checksum(arrived: buckets.NamedTensors) -> str:
        seen.append({name: tensor.clone() for name, tensor in arrived})
        serving.append(fleet.subscribers[0].serving.is_set())
        if len(seen) == 1:
            raise VerificationFailed("the engine does not hold the adapter that has arrived")
        return "right"

    engine.receiver = Receiver(engine._layout, engine._load, checksum, adapter=OWN)
    with Publisher(CONFIG, 1, 7, endpoint, adapter=OWN) as publisher:
        weights = fleet.publish(publisher, 0)
        await asyncio.to_thread(publisher.wait_applied, 0, 20)
        assert publisher.gauges()["sync/refits"] == 1.0
    assert serving == [False, False]
    assert fleet.subscribers[0].serving.is_set() and fleet.subscribers[0].verified == (7, 0)
    assert all(torch.equal(given[name], weights[name]) for given in seen for name in weights)


async def test_a_version_that_was_never_written_does_not_pass_for_the_last(
    fleet: Fleet, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker says that it has applied, and has not: the older checksum does not answer for it,
    nor does the probe, of the same weights.
    """
    config = msgspec.structs.replace(CONFIG, publish_deadline_s=0.5)
    engine = fleet.add("actor-0", config)
    with fleet.publisher(1) as publisher:
        weights = fleet.publish(publisher, 0)
        await asyncio.to_thread(publisher.wait_applied, 0, 20)
        engine.receiver.apply = engine.receiver.arrived  # type: ignore[method-assign]
        publisher.publish(1, weights.items(), PROBE, score(weights, PROBE))
        async with asyncio.timeout(20):
            while "weight_sync_checksum was not done" not in caplog.text:
                await asyncio.sleep(0.02)


def test_an_adapter_of_rank_8_is_less_than_a_fiftieth_of_its_model() -> None:
    """Of SmolLM2-135M's shape, as both are laid out to be sent."""
    hidden, inner, keys, layers, vocabulary = 576, 1536, 192, 30, 49_152
    linears = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden,) * 2}
    linears |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    whole = {"embed": (vocabulary, hidden), "norm": (hidden,)}
    adapter = {}
    for layer in range(layers):
        whole |= {f"{layer}.{norm}": (hidden,) for norm in ("input", "attention")}
        for name, (rows, columns) in linears.items():
            whole[f"{layer}.{name}"] = (rows, columns)
            a, b = names_of(f"{layer}.{name}")
            adapter |= {a: (8, columns), b: (rows, 8)}
    assert sent_bytes(whole) == pytest.approx(2 * 134_515_008, rel=1e-4)
    assert 0.01 < sent_bytes(adapter) / sent_bytes(whole) <= 0.02


def sent_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """Of bf16 tensors."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    _, sizes = buckets.plan(buckets.InTurn(lambda: iter(tensors.items())), 1 << 26, torch.bfloat16)
    return sum(sizes)


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.0.self_attn.q_proj", "q_proj"),
        ("transformer.h.11.mlp.c_fc", "c_fc"),
        ("0.down_proj", "down_proj"),
        ("model.layers.7.input_layernorm", "input_layernorm"),
        ("model.embed_tokens", ""),
        ("lm_head", ""),
        ("model.layers.3", ""),
    ],
)
def test_a_layer_is_named_by_its_last_part_within_a_block(path: str, layer: str) -> None:
    assert layer_in_a_block(path) == weight_in_a_block(f"{path}.weight") == layer
    assert weight_in_a_block(path) == weight_in_a_block(f"{path}.bias") == ""

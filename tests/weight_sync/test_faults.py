"""Every way in which a version can go wrong is caught, each time, and healed where it can be."""

import asyncio
from typing import Any

import pytest
import torch

from weight_sync.protocol import Applied, VerificationFailed
from weight_sync.publisher import Publisher
from weight_sync.transports.collective import GlooTransport
from weight_sync.verification import REFITS, Verification


async def wait_applied(publisher: Publisher, version: int) -> None:
    await asyncio.to_thread(publisher.wait_applied, version, 20.0)


async def wait_refits(publisher: Publisher, version: int) -> float:
    await wait_applied(publisher, version)
    return publisher.gauges()["sync/refits"]


def only_some(rows: int, names: tuple[str, ...] = ("embed", "head")) -> Any:
    """A load that writes so many rows of these tensors."""

    def load(weights: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
        for name in names:
            weights[name][:rows] = given[name][:rows]

    return load


def swap(weights: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    """A load that takes each of two tensors of one shape for the other."""
    weights["embed"].copy_(given["head"])
    weights["head"].copy_(given["embed"])


FAULTS = {
    "nothing is written": only_some(0),
    "half is written": only_some(4),
    "the head is left stale": only_some(8, ("embed",)),
    "two tensors are swapped": swap,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_load_that_goes_wrong_never_serves(fleet, fault: str) -> None:
    engine = fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        engine.receiver._load = lambda named: FAULTS[fault](engine.weights, dict(named))
        fleet.publish(publisher, 1)
        with pytest.raises(VerificationFailed, match="actor-0, version 1"):
            await wait_applied(publisher, 1)
    assert not fleet.subscribers[0].serving.is_set()
    assert fleet.subscribers[0].verified == (7, 0)


async def test_a_flipped_bit_is_caught_before_it_is_loaded(fleet, monkeypatch) -> None:
    engine = fleet.add("actor-0")
    before = {name: tensor.clone() for name, tensor in engine.weights.items()}
    with fleet.publisher(1) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        broadcast = GlooTransport.broadcast

        def flip(transport: GlooTransport, staging: list[torch.Tensor], deadline_s: float) -> None:
            broadcast(transport, staging, deadline_s)
            staging[0][:1].add_(1 if transport.rendezvous.rank else 0)

        monkeypatch.setattr(GlooTransport, "broadcast", flip)
        fleet.publish(publisher, 0)
        with pytest.raises(VerificationFailed, match=r"announced digest .* received .*actor-0"):
            await wait_applied(publisher, 0)
    assert all(torch.equal(engine.weights[name], before[name]) for name in before)
    assert "resume" not in engine.calls


async def test_a_bit_that_flips_once_is_sent_again(fleet, monkeypatch) -> None:
    """The version before serves on meanwhile: nothing was written."""
    engine = fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        broadcast, flipped = GlooTransport.broadcast, []

        def flip(transport: GlooTransport, staging: list[torch.Tensor], deadline_s: float) -> None:
            broadcast(transport, staging, deadline_s)
            if transport.rendezvous.rank and not flipped:
                staging[0][:1].add_(1)
                flipped.append(fleet.subscribers[0].serving.is_set())

        monkeypatch.setattr(GlooTransport, "broadcast", flip)
        weights = fleet.publish(publisher, 1)
        assert await wait_refits(publisher, 1) == 1
    assert flipped == [True] and fleet.subscribers[0].verified == (7, 1)
    assert torch.equal(engine.weights["head"], weights["head"])
    assert engine.calls.count("pause") == 2, "once for each version that was written"


async def test_a_load_that_goes_wrong_once_is_done_again(fleet) -> None:
    engine = fleet.add("actor-0")
    load = engine.receiver._load
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)

        def fail_once(named: Any) -> None:
            engine.receiver._load = load
            FAULTS["half is written"](engine.weights, dict(named))

        engine.receiver._load = fail_once
        weights = fleet.publish(publisher, 1)
        assert await wait_refits(publisher, 1) == 1
    assert torch.equal(engine.weights["head"], weights["head"])
    assert fleet.subscribers[0].serving.is_set()


async def test_weights_that_differ_by_less_than_the_probe_sees(fleet) -> None:
    """Of three actors the one that differs gets the version again; if it helps nothing, it is
    named."""
    odd = [fleet.add(f"actor-{i}") for i in range(3)][2]
    load = odd.receiver._load

    def nearly(named: Any) -> None:
        load(named)
        odd.weights["head"][0, 0] += 1e-6

    with fleet.publisher(3) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        odd.receiver._load = nearly
        fleet.publish(publisher, 1)
        with pytest.raises(
            VerificationFailed, match=r"version 1: weights differ.*actor-2 [0-9a-f]"
        ):
            await wait_applied(publisher, 1)
        assert odd.calls.count("apply") == 2 + REFITS
    assert [each.verified for each in fleet.subscribers[:2]] == [(7, 1), (7, 1)]


async def test_an_engine_that_calls_a_version_by_another_number(fleet) -> None:
    engine = fleet.add("actor-0")
    label = engine.set_policy_version
    engine.set_policy_version = lambda version: label(version + 1)
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        with pytest.raises(VerificationFailed, match=r"calls it version 1 \(actor-0, version 0"):
            await wait_applied(publisher, 0)
    assert not fleet.subscribers[0].serving.is_set()


async def test_who_has_lost_its_weights_says_so_when_it_joins_again(fleet) -> None:
    """Its load failed half-way, and then its connection broke: it must not pass for served."""
    engine = fleet.add("actor-0")
    load = engine.receiver._load
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        fleet.subscribers[0].serving.clear()
        publisher._channel._routing_ids.clear()  # as if cut off: it says Join again
        calls = engine.calls.count("apply")
        while engine.calls.count("apply") == calls:
            await asyncio.sleep(0.01)
        await wait_applied(publisher, 0)
        assert engine.receiver._load == load
        while not fleet.subscribers[0].serving.is_set():
            await asyncio.sleep(0.01)


async def test_what_is_sent_again_is_in_doubt_until_it_verifies(fleet, monkeypatch) -> None:
    """Two of two differ: both get the version again, and neither delivers meanwhile."""
    engines = [fleet.add("actor-0"), fleet.add("actor-1")]
    load, broadcast, serving = engines[1].receiver._load, GlooTransport.broadcast, []

    def nearly_once(named: Any) -> None:
        load(named)
        engines[1].weights["head"][0, 0] += 1e-6
        engines[1].receiver._load = load

    def noting(transport: GlooTransport, staging: list[torch.Tensor], deadline_s: float) -> None:
        if not transport.rendezvous.rank:
            serving.append([each.serving.is_set() for each in fleet.subscribers])
        broadcast(transport, staging, deadline_s)

    engines[1].receiver._load = nearly_once
    monkeypatch.setattr(GlooTransport, "broadcast", noting)
    with fleet.publisher(2) as publisher:
        fleet.publish(publisher, 0)
        assert await wait_refits(publisher, 0) == 2
    assert serving == [[False, False]] * 2 and all(s.serving.is_set() for s in fleet.subscribers)


def said(name: str, version: int = 4, checksum: str = "a") -> Applied:
    return Applied(name, 1, 7, version, "", checksum, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_an_actor_that_applied_another_version_than_was_sent() -> None:
    verification = Verification()
    verification.compare([said("actor-0"), said("actor-1", version=5)], 4)
    assert verification.unfit(["actor-0", "actor-1"]) == {
        "actor-1": "actor-1 applied version 5 for 4"
    }
    assert verification.unfit(["actor-1"]) == {} and verification.refits == 1


def test_an_actor_of_another_version_is_not_compared_as_well() -> None:
    verification = Verification()
    verification.compare([said("actor-0"), said("actor-1", version=5, checksum="b")], 4)
    assert list(verification.unfit(["actor-0", "actor-1"])) == ["actor-1"]


def test_one_who_joined_later_is_compared_with_those_before() -> None:
    verification = Verification()
    verification.compare([said("actor-0"), said("actor-1")], 4)
    verification.compare([said("actor-2", checksum="b")], 4)
    assert list(verification.unfit(["actor-0", "actor-1", "actor-2"])) == ["actor-2"]


def test_where_no_half_agrees_all_get_it_again() -> None:
    verification = Verification()
    for _ in range(REFITS):
        verification.compare([said("actor-0"), said("actor-1", checksum="b")], 4)
        assert list(verification.unfit(["actor-0", "actor-1"])) == ["actor-0", "actor-1"]
    with pytest.raises(VerificationFailed, match="actor-0 a, actor-1 b"):
        verification.compare([said("actor-0"), said("actor-1", checksum="b")], 4)


def test_failures_count_in_a_row_only() -> None:
    verification = Verification()
    for version in range(3 * REFITS):
        verification.failed("actor-0", VerificationFailed("once"))
        verification.unfit(["actor-0"])
        verification.compare([said("actor-0", version)], version)
    assert verification.refits == 3 * REFITS

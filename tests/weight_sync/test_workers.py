"""An engine whose workers share its model out: each receives, all must have succeeded."""

import asyncio

import pytest
import torch

from tests.weight_sync.conftest import CONFIG, BareEngine, Fleet, make_weights, score
from weight_sync.buckets import Layout, NamedTensors, digest, dtype_name
from weight_sync.protocol import (
    Applied,
    ManifestMismatch,
    VerificationFailed,
    WorkerReport,
    combined,
)
from weight_sync.receiver import Receiver
from weight_sync.subscriber import Subscriber
from weight_sync.verification import Verification

WORKERS = 2


class Worker:
    """One half of the rows of each tensor."""

    def __init__(self, number: int, engine: "SharedEngine") -> None:
        self.number, self.shard = number, engine.shard(number)
        self.layout: Layout = {
            n: (tuple(t.shape), dtype_name(t.dtype)) for n, t in make_weights(0).items()
        }
        self.stale = ""  # the tensor that a load leaves as it was
        self.receiver = Receiver(
            lambda: self.layout, self._load, self._checksum, "cpu", number, WORKERS
        )

    def _load(self, named_tensors: NamedTensors) -> None:
        for name, tensor in named_tensors:
            if name != self.stale:
                self.shard[name].copy_(tensor.chunk(WORKERS)[self.number])

    def _checksum(self, _: NamedTensors) -> str:
        return digest(tensor.view(torch.uint8).flatten() for tensor in self.shard.values())


class SharedEngine(BareEngine):
    """A ServingEngine of workers that share its weights out."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = [Worker(number, self) for number in range(WORKERS)]

    def shard(self, number: int) -> dict[str, torch.Tensor]:
        return {name: each.chunk(WORKERS)[number] for name, each in self.weights.items()}

    async def call_workers(self, method: str, *args: bytes | int | str | float) -> list[bytes]:
        name = method.removeprefix("weight_sync_")
        calls = [asyncio.to_thread(getattr(w.receiver, name), *args) for w in self.workers]
        return list(await asyncio.gather(*calls))


def add(fleet: Fleet, actor_id: str) -> SharedEngine:
    engine = SharedEngine()
    fleet.subscribers.append(Subscriber(actor_id, fleet.endpoint, engine, CONFIG))
    fleet.tasks.append(asyncio.create_task(fleet.subscribers[-1].run()))
    return engine


async def test_each_worker_receives_and_writes_its_shard(fleet: Fleet) -> None:
    """Beside an actor of one worker, whose checksum is of other tensors."""
    engines = [add(fleet, "actor-0"), fleet.add("actor-1"), add(fleet, "actor-2")]
    with fleet.publisher(3) as publisher:
        for version in range(3):
            weights = fleet.publish(publisher, version)
            await asyncio.to_thread(publisher.wait_applied, version, 20.0)
            for engine in engines:
                assert all(torch.equal(engine.weights[name], weights[name]) for name in weights)
        assert publisher.gauges()["sync/refits"] == 0.0


@pytest.mark.parametrize("worker", range(WORKERS))
async def test_a_stale_shard_is_caught(fleet: Fleet, worker: int) -> None:
    engine = add(fleet, "actor-0")
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await asyncio.to_thread(publisher.wait_applied, 0, 20.0)
        engine.workers[worker].stale = "embed"
        fleet.publish(publisher, 1)
        with pytest.raises(VerificationFailed, match=r"not the learner's.*actor-0, version 1"):
            await asyncio.to_thread(publisher.wait_applied, 1, 30.0)


async def test_a_shard_that_the_probe_does_not_touch_is_told_by_its_checksum(fleet: Fleet) -> None:
    engines = [add(fleet, f"actor-{number}") for number in range(3)]
    with fleet.publisher(3) as publisher:
        fleet.publish(publisher, 0)
        await asyncio.to_thread(publisher.wait_applied, 0, 20.0)
        weights = make_weights(1)
        unread = [0, 2, 6, 7]  # tokens that the probe neither reads nor predicts from
        engines[1].workers[1].stale = "embed"
        engines[1].weights["embed"].copy_(weights["embed"])
        engines[1].weights["embed"][unread] = 0.0
        publisher.publish(1, weights.items(), (3, 1, 4, 1, 5), score(weights, (3, 1, 4, 1, 5)))
        with pytest.raises(VerificationFailed, match=r"weights differ between actors: actor-0 "):
            await asyncio.to_thread(publisher.wait_applied, 1, 30.0)


async def test_what_one_worker_refuses_the_engine_refuses_and_it_is_named(fleet: Fleet) -> None:
    engine = add(fleet, "actor-0")
    engine.workers[1].layout = {"embed": ((8, 4), "float32")}
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        said = r"'head': learner float32\[8, 4\], actor has none \(worker 2 of 2\) \(actor-0"
        with pytest.raises(ManifestMismatch, match=said):
            await asyncio.to_thread(publisher.wait_applied, 0, 20.0)


def test_reports_of_workers_become_one() -> None:
    one = WorkerReport("d", ("a",), ("cpu",), receive_s=1.0, apply_s=4.0)
    two = WorkerReport("d", ("b",), ("cuda:1",), receive_s=3.0, apply_s=2.0)
    both = WorkerReport("d", ("a", "b"), ("cpu", "cuda:1"), receive_s=3.0, apply_s=4.0)
    assert combined([one, two]) == both and combined([one]) == one
    assert combined([one, WorkerReport(pending=True)]).pending
    late = WorkerReport(error="SyncTimeout: late")
    assert combined([late]).error == "SyncTimeout: late"
    assert combined([WorkerReport(pending=True), late]).error == "SyncTimeout: late (worker 2 of 2)"


def applied(actor_id: str, *checksums: str) -> Applied:
    return Applied(actor_id, 1, 0, 3, "d", checksums, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_shards_are_compared_among_actors_of_as_many_workers() -> None:
    verification = Verification()
    verification.compare([applied("a", "x"), applied("b", "p", "q"), applied("c", "p", "q")], 3)
    assert not verification.unfit("abc")
    verification.compare([applied("d", "p", "r")], 3)
    assert verification.unfit("abcd") == {
        "d": "version 3: weights differ between actors: b p q, c p q, d p r"
    }

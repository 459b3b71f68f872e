"""Actors, a learner and replay with a faulty wire between them: every fault heals, in its time."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from replay.clients.actor import TrajectoryWriter
from replay.clients.learner import BatchReader
from replay.codec import decode_reply, decode_request
from replay.log.event_log import read
from replay.log.records import Delivered, Sampled
from replay.protocol import Batch, CodecError, Hello, Lease
from scripts.runs.books import Audit
from tests.faults.message_shim import ChaosShim, Faults
from tests.faults.tcp_proxy import ChaosProxy
from tests.faults.tcp_proxy import Faults as Noise

SETTINGS = {
    "groups_per_step": 4, "group_size": 4, "max_staleness": 1, "heartbeat_s": 0.05,
    "dead_after_s": 0.5,
}  # fmt: skip
WHOLE_S = 200.0  # a fault that does not heal holds the run up for group_deadline_s, 300
pytestmark = pytest.mark.timeout(250)


class Play:
    """Actors that roll out what they are leased and a learner that trains `steps` batches."""

    patience_s = 0.5

    def __init__(self, running, rollout, endpoint: str, actors: int = 3) -> None:
        self.running, self.rollout, self.endpoint = running, rollout, endpoint
        self.names = [f"actor-{i}" for i in range(actors)]
        self.version, self.rolled_out = 0, 0
        self.acknowledged: Counter[tuple[int, int]] = Counter()

    def writer(self, name: str) -> TrajectoryWriter:
        hello = Hello(name, "digest")
        limits = (0.05, self.patience_s, self.running.keys)
        return TrajectoryWriter(self.endpoint, hello, *limits, restart_deadline_s=150.0)

    async def run(self, steps: int) -> Audit:
        """To the end of the run, and its books."""
        async with asyncio.timeout(WHOLE_S), AsyncExitStack() as stack:
            writers = [await stack.enter_async_context(self.writer(name)) for name in self.names]
            async with asyncio.TaskGroup() as group:
                for name, writer in zip(self.names, writers, strict=True):
                    group.create_task(self.act(name, writer))
                await self.learn(steps, writers)
        await self.until(lambda: not any(self.running.ledger.state.held.values()), "leases stay")
        self.running.end()
        return self.check(steps)

    async def learn(self, steps: int, writers: list[TrajectoryWriter]) -> None:
        limits = (60.0, self.patience_s, self.running.keys)
        with BatchReader(self.endpoint, 1, *limits, restart_deadline_s=150.0) as reader:
            assert await asyncio.to_thread(reader.resume, 0) == 0
            for step in range(1, steps + 1):
                for writer in writers:
                    await writer.ready(16, 1, self.version)
                batch = await asyncio.to_thread(reader.sample, step - 1)
                assert isinstance(batch, Batch) and batch.step == step
                await asyncio.to_thread(reader.report, step, {"learner/loss": 1.0})
                await asyncio.to_thread(reader.committed, step)
                self.version = step
            await asyncio.to_thread(reader.finish)

    async def act(self, name: str, writer: TrajectoryWriter) -> None:
        async with asyncio.TaskGroup() as rollouts:
            while isinstance(item := await writer.next(), Lease):
                rollouts.create_task(self.serve(name, writer, item))

    async def serve(self, name: str, writer: TrajectoryWriter, lease: Lease) -> None:
        self.rolled_out += 1
        number = self.rolled_out
        await asyncio.sleep(0.005 * (number % 5))
        if number % 20 == 0:
            await writer.fail(lease, "retrieval")
            return
        trajectory = self.rollout(lease, name, version=self.version)
        if await writer.deliver(trajectory) == "accepted":
            self.acknowledged[lease.group_id, lease.sibling] += 1

    async def until(self, reached: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + 20.0
        while not reached():
            assert time.monotonic() < end_s, what
            await asyncio.sleep(0.02)

    def check(self, steps: int) -> Audit:
        """Nothing lost, nothing twice, and the books close."""
        audit = Audit()
        audit.fold(self.running.log_path)
        assert audit.faults == []
        facts = list(read(self.running.log_path))
        taken = Counter((f.group_id, f.sibling) for f in facts if isinstance(f, Delivered))
        assert set(taken.values()) == {1} and self.acknowledged.keys() <= taken.keys()
        trained = [i for fact in facts if isinstance(fact, Sampled) for i in fact.group_ids]
        assert len(trained) == len(set(trained)) == steps * SETTINGS["groups_per_step"]
        summary = audit.summary()
        assert summary["leases"]["held"] == 0
        assert summary["train_groups"]["committed"] == len(trained)
        assert summary["train_groups"].get("dropped: group_deadline", 0) == 0
        return audit


@pytest.fixture
def shim(serve) -> Iterator[ChaosShim]:
    """Between a server, `shim.running`, and `shim.endpoint`."""
    running = serve(**SETTINGS)
    endpoint = f"{running.endpoint}-shim"
    with ChaosShim(endpoint, running.endpoint) as shim:
        shim.running, shim.endpoint = running, endpoint
        yield shim


MESSAGES = {
    "duplicate": Faults(duplicate=0.2),
    "reorder": Faults(reorder=0.2),
    "a mix": Faults(drop=0.05, duplicate=0.1, reorder=0.1),  # what is lost takes longest
}


@pytest.mark.parametrize(
    "kind", ["duplicate", "reorder", pytest.param("a mix", marks=pytest.mark.slow)]
)
async def test_whole_messages_are_lost_doubled_and_reordered(shim, rollout, kind: str) -> None:
    shim.to_replay = shim.to_client = MESSAGES[kind]
    await Play(shim.running, rollout, shim.endpoint).run(steps=6 if kind == "a mix" else 10)
    assert all(shim.counts[name] > 5 for name in shim.counts)


@pytest.mark.slow
async def test_the_first_messages_of_every_kind_are_lost(shim, rollout, monkeypatch) -> None:
    monkeypatch.setattr("replay.clients.session.HELLO_AGAIN_S", 0.25)
    seen: Counter[str] = Counter()

    def early(message: bytes) -> bool:
        kind = type(_decoded(message)).__name__
        seen[kind] += 1
        return seen[kind] <= 2

    shim.to_replay = shim.to_client = Faults(drop=1.0, picks=early)
    play = Play(shim.running, rollout, shim.endpoint, actors=1)
    play.patience_s = 0.25  # of each kind two in a row are waited for in vain
    await play.run(steps=3)
    assert {"Hello", "Welcome", "Ready", "Leases", "Deliver", "Acknowledged", "Batch"} < set(seen)
    assert {"LeaseFailed", "Stop", "Goodbye", "Unknown", "Resumed", "Done"} < set(seen)


def _decoded(message: bytes) -> object:
    try:
        return decode_request(message)
    except CodecError:
        return decode_reply(message)


STREAMS = {
    "delay": Noise(delay_s=0.01),
    "corrupt": Noise(corrupt=0.01),
    "cut": Noise(),
    "half-open": Noise(),
    "a mix": Noise(delay_s=0.005, corrupt=0.005),
}


async def disturb(proxy: ChaosProxy, kind: str) -> None:
    """Cuts, and stretches of half-open connections, until cancelled."""
    sound, often = proxy.faults, 0
    while True:
        await asyncio.sleep(0.15)
        often += 1
        if kind == "cut" or (kind == "a mix" and often % 2):
            proxy.cut()
        elif kind in ("half-open", "a mix"):
            proxy.faults = Noise(half_open=True)
            await asyncio.sleep(0.2 if often % 2 else 0.8)  # shorter and longer than dead_after_s
            proxy.faults = sound


async def play_through(proxy: ChaosProxy, play: Play, kind: str, steps: int) -> Audit:
    disturbing = asyncio.create_task(disturb(proxy, kind))
    try:
        return await play.run(steps)
    finally:
        disturbing.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
async def test_a_faulty_network_under_curve(serve, rollout, endpoint, kind: str) -> None:
    running = serve(tcp=True, **SETTINGS)
    async with ChaosProxy(endpoint(), running.endpoint, STREAMS[kind]) as proxy:
        play = Play(running, rollout, proxy.listen)
        await play_through(proxy, play, kind, steps={"a mix": 5, "corrupt": 8}.get(kind, 20))
    assert proxy.cuts or proxy.flipped or kind in ("delay", "half-open")
    assert running.server.gauges()["replay/refused_messages"] == 0.0  # CURVE saw it first


@pytest.mark.slow
async def test_bytes_changed_on_the_way_are_refused_and_counted(serve, rollout) -> None:
    running = serve(**SETTINGS)
    noise = Noise(corrupt=0.02)
    async with ChaosProxy(f"{running.endpoint}-proxy", running.endpoint, noise) as proxy:
        await Play(running, rollout, proxy.listen).run(steps=15)
    assert proxy.flipped > 5
    assert running.server.gauges()["replay/refused_messages"] > 0.0

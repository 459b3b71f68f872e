"""Whoever has no business here is refused with a reason on record, and the run goes on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from configs.keys import Keys
from replay.clients.actor import TrajectoryWriter
from replay.clients.learner import BatchReader
from replay.protocol import PROTOCOL, Batch, Hello, Lease, RefusedByReplay, ReplayTimeout


class Run:
    """A served run over tcp, its learner of incarnation 2 and its actor, for one batch a call."""

    def __init__(self, running: Any, learner: BatchReader, actor: TrajectoryWriter) -> None:
        self.running, self.learner, self.actor, self.step = running, learner, actor, 0

    async def train(self, rollout: Callable[..., Any]) -> None:
        """Two siblings are leased, delivered and trained."""
        await self.actor.ready(2, 2, self.step)
        for _ in range(2):
            lease = await asyncio.wait_for(self.actor.next(), 15.0)
            assert isinstance(lease, Lease)
            assert await self.actor.deliver(rollout(lease, version=self.step)) == "accepted"
        assert isinstance(await asyncio.to_thread(self.learner.sample, self.step), Batch)
        self.step += 1

    def speaking(
        self, hello: Hello, keys: Keys | None, dead_after_s: float, restart_deadline_s: float
    ) -> TrajectoryWriter:
        """Somebody else's connection."""
        limits = (0.05, dead_after_s, keys, restart_deadline_s)
        return TrajectoryWriter(self.running.endpoint, hello, *limits)


@pytest.fixture
async def run(serve) -> AsyncIterator[Run]:
    running = serve(tcp=True, max_staleness=0)
    hello = Hello("actor-0", "digest", instance="first")
    with BatchReader(running.endpoint, 2, 10.0, keys=running.keys) as learner:
        learner.resume(0)
        async with TrajectoryWriter(running.endpoint, hello, 0.05, 5.0, keys=running.keys) as actor:
            yield Run(running, learner, actor)


async def refused(run: Run, hello: Hello) -> str:
    """Return the reply to an actor that says this."""
    async with run.speaking(hello, run.running.keys, 10.0, 60.0) as stranger:
        with pytest.raises(RefusedByReplay) as found:
            await asyncio.wait_for(stranger.next(), 15.0)
    return str(found.value)


async def left_alone(run: Run, keys: Keys | None) -> str:
    """Return how long an actor with these keys waits in vain, in its own words."""
    async with run.speaking(Hello("actor-9", "digest"), keys, 0.3, 1.0) as stranger:
        with pytest.raises(ReplayTimeout) as found:
            await asyncio.wait_for(stranger.next(), 15.0)
    return str(found.value)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_strangers_are_refused_by_name_and_the_run_goes_on(
    run, rollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await run.train(rollout)
    others = Keys(tmp_path / "others").make()
    mixed = Keys(tmp_path / "mixed").make()  # the run's server, but a client of another run
    server = run.running.keys.folder / "server.key"
    (mixed.folder / "server.key").write_bytes(server.read_bytes())
    timed_out = f"for the answer to a heartbeat from replay at {run.running.endpoint}"
    # No key, a wrong server key, a wrong key of its own.
    alone = asyncio.gather(*(left_alone(run, keys) for keys in (None, others, mixed)))
    await run.train(rollout)
    assert [timed_out in said for said in await alone] == [True] * 3
    await run.train(rollout)
    told = {
        "protocol": Hello("actor-9", "digest", protocol=PROTOCOL - 1),
        "tokenizer": Hello("actor-9", "another"),
        "connected already": Hello("actor-0", "digest", instance="second"),
    }
    for reason, hello in told.items():
        assert reason in await refused(run, hello)
        await run.train(rollout)
    with BatchReader(run.running.endpoint, 1, 5.0, keys=run.running.keys) as older:
        for ask in (older.sample, older.resume, older.committed):
            with pytest.raises(RefusedByReplay, match="incarnation 1"):
                await asyncio.to_thread(ask, 0)
    await run.train(rollout)
    reasons = (*told, "incarnation 1", "does not speak CurveZMQ", "its key is not this run's")
    for reason in reasons:
        assert reason in caplog.text

"""Replay's process is killed and started again on its log, while an actor and a learner go on."""

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.keys import Addresses
from configs.load import load
from replay.clients.actor import TrajectoryWriter
from replay.clients.launcher import Observer
from replay.clients.learner import BatchReader
from replay.codec import decode_trajectory
from replay.log.event_log import FILE_NAME, read_whole
from replay.log.records import (
    Delivered,
    LeaseReturned,
    Record,
    ReplayRestarted,
    Resampled,
    RunStarted,
    Sampled,
    Superseded,
)
from replay.protocol import Hello, Lease, RefusedByReplay, ReplayTimeout, Stop
from replay.worker import main
from scripts.runs.books import Audit
from tests.children import ends_with_us

SETTINGS = """
run_dir: {folder}/run
questions: {{train: {folder}/train.jsonl}}
actors: {{drain_deadline_s: 1}}
learner: {{step_deadline_s: 2, total_steps: {steps}}}
replay:
  groups_per_step: 2
  group_size: 2
  max_staleness: 1
  heartbeat_s: 0.05
  dead_after_s: {dead_after_s}
  endpoint: ipc://{folder}/replay
"""
STEPS = 12


class Replay:
    """`python -m replay.worker` on a log of its own."""

    def __init__(self, folder: Path, dead_after_s: float) -> None:
        self.folder, self.config = folder, folder / "run.yaml"
        lines = [f'{{"question": "who is {i}?", "answers": ["{i}"]}}\n' for i in range(50)]
        (folder / "train.jsonl").write_text("".join(lines))
        settings = {"folder": folder, "steps": STEPS, "dead_after_s": dead_after_s}
        self.config.write_text(SETTINGS.format(**settings))
        self.endpoint = Addresses.of(load(self.config)).replay.endpoint
        self.process = self._start()

    def _start(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "replay.worker", str(self.config), *flags]
        return subprocess.Popen(command, env=ends_with_us())

    def kill(self) -> None:
        """kill -9, and nothing is started in its place yet."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Started again on its log."""
        self.process = self._start("--restart")

    async def killed(self, meanwhile_s: float = 0.1) -> None:
        """Killed, away for a while and as long as a start takes, and back."""
        self.kill()
        await asyncio.sleep(meanwhile_s)
        self.restart()

    @property
    def facts(self) -> list[Record]:
        return list(read_whole(self.folder / "run" / FILE_NAME))

    def check(self, kills: int, superseded: int = 0) -> Audit:
        """The books close; what was delivered is on record once; no batch came twice."""
        audit = Audit()
        audit.fold(self.folder / "run" / FILE_NAME)
        assert audit.faults == []
        assert audit.summary()["replay_restarts"] == kills
        facts = self.facts
        taken = Counter((f.group_id, f.sibling) for f in facts if isinstance(f, Delivered))
        assert set(taken.values()) <= {1}
        assert sum(isinstance(fact, Superseded) for fact in facts) == superseded
        assert not any(isinstance(fact, Resampled) for fact in facts)
        return audit

    def count(self, kind: type, **fields: object) -> int:
        """Records of this kind."""
        return sum(
            isinstance(fact, kind) and all(getattr(fact, k) == v for k, v in fields.items())
            for fact in self.facts
        )


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> Iterator[Replay]:
    folder = Path(tempfile.mkdtemp(prefix="forage-test-"))
    found = Replay(folder, dead_after_s=getattr(request, "param", 5.0))
    yield found
    found.kill()
    shutil.rmtree(folder)


def writer(replay: Replay, actor_id: str = "actor-0", digest: str = "digest") -> TrajectoryWriter:
    return TrajectoryWriter(
        replay.endpoint, Hello(actor_id, digest), 0.05, 1.0, restart_deadline_s=60.0
    )


@pytest.fixture
def learner(replay: Replay) -> Iterator[BatchReader]:
    with BatchReader(replay.endpoint, 1, 60.0, 1.0, restart_deadline_s=60.0) as reader:
        yield reader


async def take(actor: TrajectoryWriter, count: int) -> list[Lease]:
    items = [await asyncio.wait_for(actor.next(), 30.0) for _ in range(count)]
    assert all(isinstance(item, Lease) for item in items)
    return items  # type: ignore[return-value]


Rollout = Callable[..., object]


async def test_held_leases_stay_with_their_actor(replay, learner, rollout) -> None:
    learner.resume(0)
    async with writer(replay) as actor:
        await actor.ready(4, 1, 0)
        leases = await take(actor, 4)
        await replay.killed()
        learner.report(0, {})  # replay is back
        assert [await actor.deliver(rollout(lease)) for lease in leases] == ["accepted"] * 4
        batch = await asyncio.to_thread(learner.sample, 0)
        assert batch.group_ids == (1, 2)
        assert len(await take(actor, 4)) == 4  # its statement was repeated, so it is given more
    assert replay.count(LeaseReturned, cause="not_held") == 0
    replay.check(kills=1)


@pytest.mark.slow
async def test_a_delivery_without_acknowledgement_is_made_again(replay, learner, rollout) -> None:
    learner.resume(0)
    async with writer(replay) as actor:
        await actor.ready(4, 1, 0)
        leases = await take(actor, 4)
        replay.process.send_signal(signal.SIGSTOP)  # it takes bytes no more, the kernel does
        delivering = [asyncio.create_task(actor.deliver(rollout(lease))) for lease in leases[:2]]
        await asyncio.sleep(0.2)
        await replay.killed()
        assert await asyncio.gather(*delivering) == ["accepted"] * 2
        late = [asyncio.create_task(actor.deliver(rollout(lease))) for lease in leases[2:]]
        assert await asyncio.gather(*late) == ["accepted"] * 2
    replay.check(kills=1)
    assert replay.count(LeaseReturned, cause="not_held") == 0


@pytest.mark.slow
async def test_what_is_delivered_while_replay_is_away_arrives_once(
    replay, learner, rollout
) -> None:
    learner.resume(0)
    async with writer(replay) as actor:
        await actor.ready(4, 1, 0)
        leases = await take(actor, 4)
        replay.kill()
        delivering = [asyncio.create_task(actor.deliver(rollout(lease))) for lease in leases]
        await asyncio.sleep(0.5)
        replay.restart()
        assert await asyncio.gather(*delivering) == ["accepted"] * 4
    replay.check(kills=1)


@pytest.mark.slow
async def test_a_lease_given_back_meanwhile_is_leased_again(replay, learner) -> None:
    learner.resume(0)
    async with writer(replay) as actor:
        await actor.ready(4, 1, 0)
        leases = await take(actor, 4)
        replay.process.send_signal(signal.SIGSTOP)
        await actor.fail(leases[0], "lost with the old process")
        await asyncio.sleep(0.2)
        replay.kill()
        await actor.fail(leases[1], "told to the new one")
        replay.restart()
        again = await take(actor, 2)
        assert {(x.group_id, x.sibling) for x in again} == {(1, 0), (1, 1)}
        await asyncio.sleep(0.3)  # nothing is given back a second time
        assert replay.count(LeaseReturned) == 2
    replay.check(kills=1)


@pytest.mark.slow
async def test_a_waiting_sample_is_asked_again(replay, learner, rollout) -> None:
    learner.resume(0)
    async with writer(replay) as actor:
        await actor.ready(4, 1, 0)
        leases = await take(actor, 4)
        sampling = asyncio.create_task(asyncio.to_thread(learner.sample, 0))
        await asyncio.sleep(0.3)
        await replay.killed()
        for lease in leases:
            await actor.deliver(rollout(lease))
        batch = await asyncio.wait_for(sampling, 30.0)
        assert (batch.step, batch.group_ids) == (1, (1, 2))
    replay.check(kills=1)


@pytest.mark.slow
async def test_an_answer_that_was_lost_is_given_again(replay, learner, rollout) -> None:
    learner.resume(0)
    async with writer(replay) as actor:
        await actor.ready(4, 1, 0)
        for lease in await take(actor, 4):
            await actor.deliver(rollout(lease))
        first = learner.sample(0)
        await replay.killed()
        again = await asyncio.to_thread(learner.sample, 0)
        assert (again.group_ids, again.groups) == (first.group_ids, first.groups)
        for _ in range(2):
            learner.report(1, {"learner/loss": float("nan")})
            learner.committed(1)
            await replay.killed(0.0)
    assert len([fact for fact in replay.facts if isinstance(fact, Sampled)]) == 1
    with Observer(replay.endpoint, 1.0) as console:
        assert [report.step for report in console.status().steps] == [1]
    replay.check(kills=3)


@pytest.mark.slow
async def test_a_learner_s_resume_may_be_lost(replay, learner) -> None:
    assert learner.resume(0) == 0
    await replay.killed()
    assert await asyncio.to_thread(learner.resume, 0) == 0  # repeated by the same learner
    with (
        BatchReader(replay.endpoint, 1, 30.0) as other,
        pytest.raises(RefusedByReplay, match="must exceed 1"),
    ):
        other.resume(0)
    replay.check(kills=1)


async def work(replay: Replay, rollout: Rollout, learner: BatchReader) -> list[tuple[int, ...]]:
    """An actor that delivers what it is given, and a learner, to the end of the run."""
    batches: list[tuple[int, ...]] = []

    async def deliver(actor: TrajectoryWriter, lease: Lease) -> None:
        await asyncio.sleep(0.1 * ((lease.group_id + lease.sibling) % 4))
        status = await actor.deliver(rollout(lease, version=len(batches)))
        # dropped: the run has ended; superseded: replay died between its record and its answer
        assert status in ("accepted", "dropped", "superseded")

    async def act(actor: TrajectoryWriter) -> None:
        async with asyncio.TaskGroup() as rollouts:
            while isinstance(item := await actor.next(), Lease):
                rollouts.create_task(deliver(actor, item))

    async with writer(replay) as actor, asyncio.TaskGroup() as group:
        await actor.ready(8, 1, 0)
        group.create_task(act(actor))
        for step in range(STEPS):
            batch = await asyncio.to_thread(learner.sample, step)
            assert not isinstance(batch, Stop)
            for payload in (payload for group in batch.groups for payload in group):
                assert decode_trajectory(payload).group_id in batch.group_ids
            batches.append(batch.group_ids)
            await asyncio.to_thread(learner.report, step + 1, {"learner/loss": 1.0})
            await asyncio.to_thread(learner.committed, step + 1)
            await actor.ready(8, 1, step + 1)
        await asyncio.to_thread(learner.finish)
    return batches


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_run_that_loses_replay_again_and_again_ends_like_any_other(
    replay, learner, rollout
) -> None:
    learner.resume(0)
    working = asyncio.create_task(work(replay, rollout, learner))
    kills = 0
    while not working.done() and kills < 6:
        await asyncio.sleep(0.15 + 0.1 * (kills % 3))
        if replay.count(RunStarted) and not working.done():
            replay.kill()
            replay.restart()
            kills += 1
            await asyncio.wait({working}, timeout=0.5)
    batches = await asyncio.wait_for(working, 200.0)
    assert kills > 1
    sampled = [fact.group_ids for fact in replay.facts if isinstance(fact, Sampled)]
    assert batches == sampled and len(sampled) == STEPS
    audit = replay.check(replay.count(ReplayRestarted), superseded=replay.count(Superseded))
    assert replay.count(Superseded, status="superseded") <= 8 * kills  # what was under way, once
    assert audit.summary()["train_groups"]["committed"] == 2 * STEPS
    assert audit.stop_cause == "completed"


@pytest.mark.slow
async def test_a_genuine_refusal_ends_an_actor(replay, learner) -> None:
    learner.resume(0)
    async with writer(replay) as first, writer(replay, "actor-1") as second:
        await first.ready(4, 1, 0)
        await take(first, 4)
        await second.ready(4, 1, 0)
        await replay.killed()
        with Observer(replay.endpoint, 1.0) as console:
            while len(await asyncio.to_thread(lambda: console.status().fleet)) < 2:
                await asyncio.sleep(0.05)
        async with writer(replay, "actor-2", "other digest") as foreign:
            with pytest.raises(RefusedByReplay, match="tokenizer"):
                await asyncio.wait_for(foreign.next(), 30.0)
        async with writer(replay) as twin:
            with pytest.raises(RefusedByReplay, match="connected already"):
                await asyncio.wait_for(twin.next(), 30.0)


@pytest.mark.slow
async def test_a_replay_that_stays_away_is_named(replay, learner, caplog) -> None:
    learner.resume(0)
    limits = {"restart_deadline_s": 1.5}
    hello = Hello("actor-0", "digest")
    async with TrajectoryWriter(replay.endpoint, hello, 0.05, 0.3, **limits) as actor:
        await actor.ready(4, 1, 0)
        await take(actor, 4)
        replay.kill()
        with pytest.raises(ReplayTimeout, match=rf"actor-0 waited 1\.5 s .* at {replay.endpoint}"):
            await asyncio.wait_for(actor.next(), 30.0)
    assert (
        f"actor-0 waited 0.3 s for the answer to a heartbeat from replay at {replay.endpoint}"
        in (caplog.text)
    )


def test_an_observer_does_not_wait_for_a_process_that_has_ended(replay, learner) -> None:
    learner.resume(0)
    with Observer(replay.endpoint, 30.0, restart_deadline_s=0.0) as console:
        console.gone = lambda: replay.process.poll() is not None
        assert console.status().phase
        replay.kill()
        begun = time.monotonic()
        with pytest.raises(ReplayTimeout, match="its process has ended"):
            console.status()
        assert time.monotonic() - begun < 10.0


@pytest.mark.slow
@pytest.mark.parametrize("replay", [1.5], indirect=True, ids=["soon"])
async def test_an_actor_that_was_taken_for_lost_comes_back(replay, learner, rollout) -> None:
    learner.resume(0)
    async with writer(replay) as actor:
        await actor.ready(2, 1, 0)
        leases = await take(actor, 2)
        for task in actor._tasks:
            task.cancel()  # it says nothing any more
        while replay.count(LeaseReturned, cause="actor_lost") < 2:
            await asyncio.sleep(0.1)
        actor._tasks[:] = [asyncio.create_task(w) for w in (actor._listen(), actor._beat())]
        assert [await actor.deliver(rollout(lease)) for lease in leases] == ["accepted"] * 2


@pytest.mark.slow
async def test_a_stopped_run_waits_for_who_was_there(replay, learner, rollout) -> None:
    learner.resume(0)
    async with writer(replay) as actor:
        await actor.ready(4, 1, 0)
        leases = await take(actor, 4)
        with Observer(replay.endpoint, 1.0) as console:
            console.shutdown("enough")
        await replay.killed(0.0)
        assert await asyncio.wait_for(actor.next(), 30.0) == Stop("enough")
        assert [await actor.deliver(rollout(lease)) for lease in leases] == ["dropped"] * 4
    learner.finish("enough")
    assert await asyncio.to_thread(replay.process.wait, 30.0) == 0
    replay.check(kills=1, superseded=4)


def test_another_configuration_is_refused(replay, learner, capsys) -> None:
    learner.resume(0)
    replay.kill()
    assert main([str(replay.config), "--restart", "replay.max_staleness=2"]) == 2
    said = capsys.readouterr().err
    assert "replay.max_staleness = 2: the event log has 1" in said


@pytest.mark.slow
def test_a_replay_killed_before_it_wrote_anything_begins(replay, learner) -> None:
    learner.resume(0)
    replay.kill()
    (replay.folder / "run" / FILE_NAME).unlink()
    replay.restart()
    assert learner.resume(0) == 0
    assert isinstance(replay.facts[0], RunStarted)

"""Every lease ends as one trajectory or one failed lease; draining keeps its deadline."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.errors import EngineDead, GenerationFailed, TokenMismatch, ToolFailed, UnverifiedWeights
from actors.policies.base import Completion
from actors.runner import MeteredPolicy, Runner, SteadyPolicy, VerifiedVersions
from configs.schema import ActorsConfig, Config, WeightSyncConfig
from replay.codec import encode_trajectory
from replay.protocol import Lease, ReplayTimeout, Stop
from replay.trajectory import Sampling, Search, StopReason, TokenSequence, Trajectory, Turn
from retrieval_server.protocol import Passage, RetrievalTimeout

Roll = Callable[[Lease, Any], Awaitable[Trajectory]]


@dataclass
class FakeReplay:
    """Hands out what it was given, then waits for ever; remembers what came back."""

    items: list[Lease | Stop]
    delivered: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    searches: dict[int, list[Search]] = field(default_factory=dict)

    async def next(self) -> Lease | Stop:
        if not self.items:
            await asyncio.Event().wait()
        return self.items.pop(0)

    async def deliver(self, trajectory: Trajectory) -> str:
        self.delivered.append(trajectory.sibling)
        return "accepted"

    async def fail(self, lease: Lease, cause: str, searches: Sequence[Search] = ()) -> None:
        self.failed[lease.sibling] = cause
        self.searches[lease.sibling] = list(searches)


class FakeRetriever:
    """One passage for each query, named after it."""

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [[Passage(query, "", 0.0)] for query in queries]


def made(lease: Lease, version: int = 0) -> Trajectory:
    ones = np.ones(1, np.int32)
    turn = Turn(ones, np.zeros(1, np.float32), ones * version, np.empty(0, np.int32))
    return Trajectory(
        group_id=lease.group_id, sibling=lease.sibling, question_id="q", kind="train",
        actor_id="a", sampling=Sampling(), sequences=(TokenSequence(ones, (turn,)),),
        stop_reason=StopReason.ANSWERED, answer="x", reward=0.0,
    )  # fmt: skip


def make_runner(
    replay: Any, roll: Roll, serving: bool = True, passed: int = 0, **deadlines_s: float
) -> Runner:
    """A runner that is patient where a test does not say otherwise."""
    event = asyncio.Event()
    if serving:
        event.set()
    versions = VerifiedVersions(event)
    versions.add(1, passed)
    config = Config(
        actors=ActorsConfig(
            drain_deadline_s=deadlines_s.get("drain", 60.0),
            rollout_deadline_s=deadlines_s.get("rollout", 60.0),
        ),
        weight_sync=WeightSyncConfig(publish_deadline_s=0.05),
    )
    meter = MeteredPolicy(None)  # type: ignore[arg-type]
    return Runner(
        roll,
        retriever=FakeRetriever(),
        writer=replay,
        versions=versions,
        meter=meter,
        config=config,
    )


async def forever(lease: Lease, _: Any) -> Trajectory:
    await asyncio.Event().wait()
    return made(lease)


def raising(error: Exception) -> Roll:
    async def roll(lease: Lease, _: Any) -> Trajectory:
        raise error

    return roll


async def quickly(lease: Lease, _: Any) -> Trajectory:
    return made(lease)


async def test_leases_run_side_by_side_and_are_delivered(lease_for: Callable[..., Lease]) -> None:
    started: list[int] = []

    async def together(lease: Lease, _: Any) -> Trajectory:
        started.append(lease.sibling)
        while len(started) < 8:
            await asyncio.sleep(0)
        return made(lease)

    replay = FakeReplay([*(lease_for(1, n) for n in range(8)), Stop("completed")])
    assert await make_runner(replay, together).run() == "completed"
    assert sorted(replay.delivered) == list(range(8)) and not replay.failed


@pytest.mark.parametrize(
    "error", [RetrievalTimeout("slow"), GenerationFailed("abort"), TokenMismatch("turn 1: stop")]
)
async def test_infrastructure_errors_fail_the_lease(
    lease_for: Callable[..., Lease], error: Exception
) -> None:
    replay = FakeReplay([lease_for(1, 3), Stop("completed")])
    await make_runner(replay, raising(error)).run()
    assert replay.failed == {3: f"{type(error).__name__}: {error}"} and not replay.delivered


async def test_a_cause_is_cut_and_can_be_sent(lease_for: Callable[..., Lease]) -> None:
    replay = FakeReplay([lease_for(1, 3), Stop("completed")])
    await make_runner(replay, raising(ToolFailed("\ud800" + "x" * (1 << 20)))).run()
    assert len(replay.failed[3].encode()) == 1000 and replay.failed[3].startswith("ToolFailed: ?x")


async def test_what_no_message_could_hold_fails_its_lease(
    lease_for: Callable[..., Lease],
) -> None:
    class Strict(FakeReplay):
        async def deliver(self, trajectory: Trajectory) -> str:
            encode_trajectory(trajectory)
            return await super().deliver(trajectory)

    async def verbose(lease: Lease, _: Any) -> Trajectory:
        return msgspec.structs.replace(made(lease), answer="x" * (2 << 20) * lease.sibling)

    replay = Strict([lease_for(1, 0), lease_for(1, 1), Stop("completed")])
    await make_runner(replay, verbose).run()
    assert replay.delivered == [0] and replay.failed[1].startswith("CodecError: Trajectory: ")


async def test_a_failed_rollout_leaves_its_searches(lease_for: Callable[..., Lease]) -> None:
    async def search_and_fail(lease: Lease, retriever: Any) -> Trajectory:
        await retriever.retrieve(["one", "two"], 3)
        raise RetrievalTimeout("slow")

    replay = FakeReplay([lease_for(1, 3), Stop("completed")])
    await make_runner(replay, search_and_fail).run()
    found = [(each.query, each.passage_ids, each.status) for each in replay.searches[3]]
    assert found == [("one", ("one",), "ok"), ("two", ("two",), "ok")]


async def test_a_stuck_rollout_fails_at_its_deadline(lease_for: Callable[..., Lease]) -> None:
    replay = FakeReplay([lease_for(1, 3)])
    runner = make_runner(replay, forever, rollout=0.2)
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(60):
        while not replay.failed:
            await asyncio.sleep(0.05)
    assert replay.failed == {3: "rollout took over 0.2 s"} and not task.done()
    runner.stop("test")
    await task


async def test_what_is_left_after_the_drain_is_given_back(lease_for: Callable[..., Lease]) -> None:
    replay = FakeReplay([lease_for(1, n) for n in range(3)])
    runner = make_runner(replay, forever, drain=0.05)
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(60):
        while runner.gauges()["actor/rollouts_in_flight"] < 3:
            await asyncio.sleep(0)
    runner.stop("SIGTERM")
    assert await asyncio.wait_for(task, 30.0) == "SIGTERM"
    assert replay.failed == dict.fromkeys(range(3), "shutdown") and not replay.delivered


@pytest.mark.parametrize("drains", [False, True])
async def test_who_is_to_make_way_gives_back_at_once(
    lease_for: Callable[..., Lease], drains: bool
) -> None:
    replay = FakeReplay([lease_for(1, n) for n in range(3)])
    runner = make_runner(replay, forever, drain=60.0)
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(60):
        while runner.gauges()["actor/rollouts_in_flight"] < 3:
            await asyncio.sleep(0)
    if drains:
        runner.stop("SIGTERM")
        await asyncio.sleep(0.05)
        assert not replay.failed
    runner.make_way("SIGUSR1")
    assert await asyncio.wait_for(task, 30.0) == ("SIGTERM" if drains else "SIGUSR1")
    assert replay.failed == dict.fromkeys(range(3), "shutdown") and not replay.delivered


async def test_a_drain_lets_rollouts_finish(lease_for: Callable[..., Lease]) -> None:
    async def soon(lease: Lease, _: Any) -> Trajectory:
        await asyncio.sleep(0.02)
        return made(lease)

    replay = FakeReplay([lease_for(1, 0), Stop("completed")])
    await make_runner(replay, soon).run()
    assert replay.delivered == [0] and not replay.failed


async def test_nothing_is_delivered_until_verified_weights_serve(
    lease_for: Callable[..., Lease],
) -> None:
    replay = FakeReplay([lease_for(1, 0)])
    runner = make_runner(replay, quickly, serving=False)
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(60):
        while not replay.failed:
            await asyncio.sleep(0.01)
    assert not replay.delivered and "UnverifiedWeights" in replay.failed[0]
    runner.stop("test")
    await task


async def test_tokens_of_a_version_that_failed_its_probe_fail_the_lease(
    lease_for: Callable[..., Lease],
) -> None:
    async def newer(lease: Lease, _: Any) -> Trajectory:
        return made(lease, version=lease.sibling)

    replay = FakeReplay([lease_for(1, 4), lease_for(1, 5), Stop("completed")])
    await make_runner(replay, newer, passed=5).run()
    assert replay.delivered == [5] and "{4}" in replay.failed[4]


async def test_a_dead_engine_ends_the_runner(lease_for: Callable[..., Lease]) -> None:
    replay = FakeReplay([lease_for(1, 0), lease_for(1, 1)])
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(make_runner(replay, raising(EngineDead("gone"))).run(), 30.0)
    assert raised.value.subgroup(EngineDead) is not None


async def test_silence_of_replay_ends_the_runner_and_its_rollouts(
    lease_for: Callable[..., Lease],
) -> None:
    class Silent(FakeReplay):
        async def next(self) -> Lease | Stop:
            if not self.items:
                raise ReplayTimeout("silent")
            return await super().next()

    replay = Silent([lease_for(1, 0)])
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(make_runner(replay, forever).run(), 30.0)
    assert raised.value.subgroup(ReplayTimeout) is not None and not replay.failed


class Aborting:
    """A policy whose engine gives up."""

    async def complete(self, tokens: Any, **_: Any) -> Any:
        raise GenerationFailed("abort")


async def complete(meter: MeteredPolicy) -> None:
    await meter.complete([1], temperature=1.0, seed=0, max_tokens=9, stops=())


async def test_completions_and_lost_requests_are_counted(
    word_tokenizer: Any, scripted: Callable[..., Any]
) -> None:
    meter = MeteredPolicy(scripted(word_tokenizer, ["<answer> kelu </answer>"]))
    await complete(meter)
    lost = MeteredPolicy(Aborting())
    with contextlib.suppress(GenerationFailed):
        await complete(lost)
    assert (meter.tokens, meter.lost, lost.tokens, lost.lost) == (3, 0, 0, 1)


async def test_tokens_of_a_version_that_was_loaded_again_are_of_nobody(
    lease_for: Callable[..., Lease],
) -> None:
    """It failed its probe, was sampled from all the same, was loaded again, and passed."""
    serving = asyncio.Event()
    serving.set()
    versions = VerifiedVersions(serving)
    versions.forget(4, in_doubt=False)
    versions.add(1, 4)
    before = versions.loads
    versions.forget(5, in_doubt=False)
    with pytest.raises(UnverifiedWeights, match=r"unverified versions \{5\}"):
        await versions.check(made(lease_for(1, 0), version=5), before, 0.05)
    versions.forget(5, in_doubt=True)
    versions.add(1, 5)
    with pytest.raises(UnverifiedWeights, match=r"loaded again: \{5\}"):
        await versions.check(made(lease_for(1, 0), version=5), before, 0.05)
    await versions.check(made(lease_for(1, 0), version=5), versions.loads, 0.05)
    await versions.check(made(lease_for(1, 0), version=4), before, 0.05)


async def test_versions_are_waited_for_until_they_have_passed() -> None:
    versions = VerifiedVersions(asyncio.Event())
    versions.add(1, 4)
    await versions.passed([4], 0.0)
    waiting = asyncio.create_task(versions.passed({4, 5, 6}, 5.0))
    await asyncio.sleep(0)
    versions.add(1, 5)
    await asyncio.sleep(0)
    assert not waiting.done()
    versions.add(1, 6)
    await waiting


async def test_a_version_that_does_not_pass_is_named() -> None:
    versions = VerifiedVersions(asyncio.Event())
    with pytest.raises(UnverifiedWeights, match=r"versions \[7\] have not passed .* for 0.01 s"):
        await versions.passed([7], 0.01)
    again = asyncio.create_task(versions.passed([7], 5.0))
    await asyncio.sleep(0)
    versions.forget(7, in_doubt=True)
    with pytest.raises(UnverifiedWeights, match="version 7 was loaded again"):
        await again


@pytest.mark.parametrize("stream", [False, True])
async def test_a_version_that_is_loaded_again_meanwhile_answers_no_call(stream: bool) -> None:
    """The bad load sampled it; that the next one passes says nothing of it."""
    versions, sampling = VerifiedVersions(asyncio.Event()), {"temperature": 1.0, "seed": 0}
    ids = np.full(2, 6, np.int32)
    whole = Completion(ids, ids.astype(np.float32), ids, "stop")

    class Loading:
        again = True

        async def complete(self, tokens: Any, **_: Any) -> Completion:
            if self.again:
                versions.forget(6, in_doubt=True)
            versions.add(1, 6)
            return whole

    loading = Loading()
    policy = SteadyPolicy(MeteredPolicy(loading), versions)
    versions.forget(6, in_doubt=False)

    async def ask() -> Completion | None:
        if not stream:
            return await policy.complete([1], max_tokens=2, stops=(), **sampling)
        parts = policy.stream([1], max_tokens=2, stops=(), **sampling)
        return [each async for each in parts][-1].done

    with pytest.raises(UnverifiedWeights, match=r"loaded again: \{6\}"):
        await ask()
    loading.again = False
    assert await ask() is whole


async def test_streamed_tokens_are_counted() -> None:
    class Whole:
        async def complete(self, tokens: Any, **sampling: Any) -> Completion:
            if not tokens:
                raise GenerationFailed("nothing")
            ids = np.arange(3, dtype=np.int32)
            return Completion(ids, ids.astype(np.float32), ids, "stop")

    meter, sampling = MeteredPolicy(Whole()), {"temperature": 1.0, "seed": 0, "max_tokens": 3}
    (delta,) = [each async for each in meter.stream([1], stops=(), **sampling)]
    assert delta.done is not None and delta.versions == {0, 1, 2}
    with pytest.raises(GenerationFailed):
        await anext(meter.stream([], stops=(), **sampling))
    assert (meter.tokens, meter.lost) == (3, 1)

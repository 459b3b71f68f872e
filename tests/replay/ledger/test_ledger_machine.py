"""The ledger against a world that kills, stalls, loses and repeats, checked after every event.

The rules (`machine.py`) are what may happen; the world (in conftest) checks each batch, lease and
opening from outside: staleness within its bound, exactly once in the surviving history, no
evaluation trained, nothing leased twice. From wherever the rules lead, a batch comes in bounded
time; and at the end an account that shares no code with replay's closes the books over the log.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from configs.schema import ActorsConfig, Config
from replay.codec import encode_trajectory
from replay.log.records import (
    ActorLeft,
    Delivered,
    GroupDropped,
    GroupOpened,
    Leased,
    Record,
    RunResumed,
    RunStarted,
)
from replay.log.summary import Summary
from replay.protocol import Evaluate, Shutdown
from replay.trajectory import Sampling, Search, StopReason, TokenSequence, Trajectory, Turn
from scripts.runs.books import Audit
from scripts.runs.record.facts import record_of
from tests.replay.ledger.conftest import Scene
from tests.replay.ledger.machine import Rules


class LedgerMachine(Rules):
    """The rules, and what must hold after each of them and in the end. `seen`: facts by kind, and
    groups dropped by cause, of all examples.
    """

    seen: Counter[str] = Counter()

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if hasattr(self, "scene"):
            state = self.scene.ledger.state
            places = [*state.opened, *state.ready, *state.sampled]
            assert len(places) == len(set(places))
            ended = state.counters.committed + state.counters.dropped.total()
            assert state.counters.opened == len(places) + ended

    @invariant()
    def each_event_leases_all_that_can_be_leased(self) -> None:
        """An event looks at its own actor only; a tick, at all of them, has nothing to add."""
        if hasattr(self, "world"):
            seen = len(self.scene.log)
            self.world.do(self.scene.tick, 0.0)
            kinds = {type(fact) for fact in self.scene.log[seen:]}
            assert kinds & {GroupDropped, ActorLeft} or not kinds & {GroupOpened, Leased}

    @invariant()
    def no_actor_is_given_more_than_it_holds(self) -> None:
        if hasattr(self, "world"):
            for actor in self.world.actors.values():
                assert not actor.connected or len(actor.flight) <= actor.capacity

    @invariant()
    def replay_knows_what_every_actor_has_in_flight(self) -> None:
        if hasattr(self, "world") and not self.world.stopped:
            held = self.scene.ledger.state.held
            for name, actor in self.world.actors.items():
                unsettled = actor.lost | actor.delivering.keys()
                assert not actor.connected or set(actor.flight) == held[name] - unsettled

    @invariant()
    def a_lost_lease_is_given_again_at_once(self) -> None:
        """Unless no actor that is current enough has room, or nothing is leased at all."""
        if not hasattr(self, "world"):
            return
        state, world = self.scene.ledger.state, self.world
        if world.stopped or state.catching_up:
            return
        able = [
            actor.applied[1]
            for name, actor in world.actors.items()
            if actor.connected
            and actor.applied[0] == world.incarnation
            and len(state.held[name]) < actor.capacity
        ]
        for group in [*state.opened.values(), *state.evaluating.values()]:
            needed = group.version if group.kind == "train" else 0
            assert not group.missing or all(version < needed for version in able)

    def teardown(self) -> None:
        """From wherever this went, batches and the evaluation come; then the books close."""
        if not hasattr(self, "world"):
            return
        for actor in self.world.actors.values():
            actor.capacity = max(actor.capacity, 2 * self.scene.config.group_size + 1)
        target = max(self.world.step, self.world.again_until) + 2
        self._everybody_works_until(lambda: self.world.step >= target)
        self._everybody_works_until(self._evaluated)
        self.commit()
        self.world.do(self.scene.send, "launcher", Shutdown("test"))
        state, counters = self.scene.ledger.state, self.scene.ledger.state.counters
        lost = len(
            state.sampled
        )  # of steps that a resumed learner had still to train when it ended
        assert counters.opened == counters.committed + counters.dropped.total() + lost
        assert not lost or self.world.step < self.world.again_until
        audited(self.scene)
        self.seen.update(
            fact.cause if isinstance(fact, GroupDropped) else type(fact).__name__
            for fact in self.scene.log
        )

    def _everybody_works_until(self, done: Any) -> None:
        for _ in range(60):
            if self.world.stopped or done():
                return
            for name in self.world.actors:
                self.world.be_diligent(name)
            self.world.train()
            self.wait(1.0)
        raise AssertionError("deadlock")

    def _evaluated(self) -> bool:
        message = Evaluate(self.world.incarnation, 1)
        return self.world.do(self.scene.send, "learner", message).result is not None


def audited(scene: Scene) -> None:
    """The log, to whoever did not write it: staleness, exactly once, every lease accounted for."""
    config = Config(replay=scene.config, actors=ActorsConfig(temperature=0.9))
    text = yaml.safe_dump(msgspec.to_builtins(config))
    audit = Audit()
    facts: list[Record] = [RunStarted(0.0, 5, text), *with_rollouts(scene)]
    for fact in facts:
        known = RunResumed(fact.now, text) if isinstance(fact, RunResumed) else fact
        audit.take(record_of(msgspec.msgpack.encode(known)))
    audit.close()
    assert audit.faults == []
    summary = audit.summary()
    assert summary["train_groups"]["unfinished"] == 0
    told = summary["merging"]
    came = [fact.summary.sequences for fact in scene.log if isinstance(fact, Delivered)]
    assert (told["rollouts"], told["sequences"]) == (len(came), sum(came))


def with_rollouts(scene: Scene) -> Iterator[Record]:
    """The log with rollouts in the place of their summaries, which the ledger was content with."""
    attempts: dict[tuple[str, int, int], int] = {}
    for fact in scene.log:
        if isinstance(fact, Leased):
            given = zip(fact.siblings, fact.attempts, strict=True)
            attempts |= {(fact.actor_id, fact.group_id, i): attempt for i, attempt in given}
        if isinstance(fact, Delivered):
            trains = fact.summary.kind == "train"
            how = Sampling(0.9 if trains else scene.eval_temperatures[fact.sibling], 5)
            attempt = attempts.get((fact.actor_id, fact.group_id, fact.sibling), 0)
            payload = payload_of(fact.summary, fact.actor_id, how, attempt)
            yield msgspec.structs.replace(fact, payload=payload)
        else:
            yield fact


def payload_of(summary: Summary, actor_id: str, sampling: Sampling, attempt: int) -> bytes:
    """A rollout that has this summary."""
    sizes = [summary.action_tokens - summary.turns + 1, *[1] * (summary.turns - 1)]
    searches = (Search("q", (), 0.1, "ok"),) * summary.searches
    turns = tuple(
        Turn(
            action_tokens=np.ones(size, np.int32),
            behaviour_logprobs=np.zeros(size, np.float32),
            policy_versions=np.full(size, summary.oldest_version, np.int32),
            observation_tokens=np.empty(0, np.int32),
            searches=() if n else searches,
            malformed=n < summary.malformed,
        )
        for n, size in enumerate(sizes)
    )
    made = Trajectory(
        group_id=summary.group_id,
        sibling=summary.sibling,
        question_id=summary.question_id,
        kind=summary.kind,
        actor_id=actor_id,
        sampling=sampling,
        sequences=tuple(shared_out(turns, summary.sequences)),
        stop_reason=StopReason.ANSWERED,
        answer="an answer",
        reward=summary.reward,
        reward_cause=summary.reward_cause,
        attempt=attempt,
    )
    return encode_trajectory(made)


def shared_out(turns: tuple[Turn, ...], count: int) -> Iterator[TokenSequence]:
    """So many sequences, the last with all turns that are left."""
    for n in range(count):
        own = turns[n : n + 1] if n + 1 < count else turns[n:]
        yield TokenSequence(np.ones(1, np.int32), own, str(n + 1) if n else "")


def _run(**how: Any) -> None:
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(LedgerMachine, settings=settings(**quiet | how))


def test_the_ledger_keeps_its_promises() -> None:
    """Failures are not shrunk here, which takes minutes: the long run does that."""
    phases = (Phase.explicit, Phase.generate)
    _run(max_examples=30, stateful_step_count=40, derandomize=True, phases=phases)


def everything_happened() -> None:
    """Every kind of fact was on record, and every cause for which a group is dropped, but for a
    learner that comes back ahead of a log that lost its end.
    """
    kinds = {kind.__name__ for kind in get_args(Record)} - {"RunStarted", "GroupDropped"}
    causes = {"group_deadline", "no_signal", "question_failed", "resumed", "run_ended"}
    assert not (kinds | causes) - LedgerMachine.seen.keys()


@pytest.mark.soak("examples")
@pytest.mark.timeout(3600)
def test_the_ledger_keeps_its_promises_for_long() -> None:
    """20 rules an example: some seven minutes of one core."""
    LedgerMachine.seen.clear()
    _run(max_examples=10_000, stateful_step_count=20)
    everything_happened()

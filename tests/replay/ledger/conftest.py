"""A scene for ledger tests: a real ledger, a clock set by hand, peers that remember their mail."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from configs.schema import ReplayConfig
from replay.events import Event, Peer, PeerLost, Tick
from replay.ledger import Ledger
from replay.protocol import (
    Batch,
    Deliver,
    Heartbeat,
    Hello,
    Lease,
    LeaseFailed,
    Leases,
    Ready,
    Reply,
    Resume,
    Sample,
    Stop,
    Unknown,
    Wait,
    Welcome,
)
from replay.questions import Questions
from replay.records import (
    GroupDropped,
    GroupOpened,
    Record,
    ReplayRestarted,
    RunResumed,
    Summary,
)
from replay.trajectory import Question, Sampling

Key = tuple[int, int]
USUAL = {"searches": 1, "malformed": 0, "turns": 2, "action_tokens": 9}


def make_questions(count: int, stem: str = "q") -> tuple[Question, ...]:
    """`count` questions, of one and two hops in turn."""
    return tuple(Question(f"{stem}-{i}", f"what {i} ?", (str(i),), 1 + i % 2) for i in range(count))


def summary_for(
    lease: Lease, reward: float | None = None, version: int = 0, **other: int
) -> Summary:
    """What a rollout of this lease comes to; sibling i is rewarded i unless told otherwise."""
    return Summary(
        group_id=lease.group_id,
        sibling=lease.sibling,
        question_id=lease.question.id,
        kind=lease.kind,
        reward=float(lease.sibling) if reward is None else reward,
        oldest_version=version,
        newest_version=version,
        **USUAL | other,
    )


def decode_summary(payload: bytes) -> Summary:
    """Payloads of these tests are encoded summaries."""
    return msgspec.msgpack.decode(payload, type=Summary)


class Scene:
    """Two groups of two per step unless told otherwise; actors speak from a peer of their name."""

    def __init__(self, evals: int = 0, questions: int = 50, **config: object) -> None:
        defaults = {"groups_per_step": 2, "group_size": 2, "max_staleness": 1}
        self.config = msgspec.convert(defaults | config, ReplayConfig)
        self.sizes = (questions, evals)
        self.now, self.log = 1000.0, list[Record]()
        self.leased: dict[Peer, list[Lease]] = {}
        self.got: dict[Peer, list[Reply]] = {}
        self.ledger = self.fresh_ledger()

    def fresh_ledger(self) -> Ledger:
        """A ledger that has seen nothing."""
        questions, evals = make_questions(self.sizes[0]), make_questions(self.sizes[1], "e")
        supply, sampling = Questions(questions, seed=5), Sampling(temperature=0.9, seed=5)
        return Ledger(self.config, supply, evals, sampling, decode_summary)

    def restart(self, resumed: bool = False) -> None:
        """Replay is killed and started again on its log; `resumed`: all else was killed too."""
        self.log.append(RunResumed(self.now, "") if resumed else ReplayRestarted(self.now))
        if resumed:
            self.leased.clear()
        self.ledger = self.fresh_ledger()
        self.ledger.restore(self.log)

    def send(self, peer: Peer, message: object) -> Reply | None:
        """Apply one event; return the direct reply to its peer."""
        outcome = self.ledger.apply(Event(peer, message), self.now)  # type: ignore[arg-type]
        self.log += outcome.records
        direct = None
        for to, reply in outcome.replies:
            self.got.setdefault(to, []).append(reply)
            if isinstance(reply, Leases):
                self.leased.setdefault(to, []).extend(reply.leases)
            elif to == peer:
                direct = reply
        return direct

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass."""
        self.now += seconds
        self.send("clock", Tick())

    def learner(self, step: int = 0, incarnation: int = 1) -> Reply | None:
        """A learner starts, having completed `step` steps."""
        return self.send("learner", Resume(incarnation, step))

    def sample(self, step: int, incarnation: int = 1) -> Reply | None:
        """The learner asks for the batch of step + 1."""
        return self.send("learner", Sample(incarnation, step))

    def actor(
        self, name: str, capacity: int, version: int = 0, incarnation: int = 1, **hello: object
    ) -> Reply | None:
        """An actor says hello and what it can do."""
        answer = self.send(name, Hello(name, "digest", **hello))  # type: ignore[arg-type]
        if not isinstance(answer, Welcome):
            return answer
        return self.send(name, Ready(name, capacity, incarnation, version))

    def lose(self, name: str) -> None:
        """An actor is killed."""
        self.leased.pop(name, None)
        self.send(name, PeerLost())

    def fail(self, name: str, lease: Lease, cause: str = "retrieval") -> None:
        """A rollout dies."""
        if lease in self.leased.get(name, []):
            self.leased[name].remove(lease)
        self.send(name, LeaseFailed(name, lease.group_id, lease.sibling, cause))

    def deliver(
        self, name: str, lease: Lease, reward: float | None = None, version: int = 0, **other: int
    ) -> str:
        """Deliver one lease; return the status of its acknowledgement."""
        if lease in self.leased.get(name, []):
            self.leased[name].remove(lease)
        payload = msgspec.msgpack.encode(summary_for(lease, reward, version, **other))
        reply = self.send(name, Deliver(name, lease.group_id, lease.sibling, payload))
        return getattr(reply, "status", repr(reply))

    def deliver_all(self, name: str, reward: float | None = None, version: int = 0) -> None:
        """Deliver what the actor holds at this moment."""
        for lease in list(self.leased.get(name, [])):
            self.deliver(name, lease, reward, version)

    def train(self, name: str, steps: int, start: int = 0) -> None:
        """One actor that applies each version at once, and a learner, for some steps."""
        for step in range(start, start + steps):
            self.send(name, Ready(name, 100, 1, step))
            self.deliver_all(name, version=step)
            self.sample(step)

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped train groups by cause."""
        return dict(self.ledger.books.tally.dropped)


@dataclass
class Rollouts:
    """One actor; `flight`: what it is rolling out, and the version under which it began."""

    capacity: int
    alive: bool = False
    connected: bool = False
    applied: tuple[int, int] = (1, 0)
    flight: dict[Key, tuple[Lease, int]] = field(default_factory=dict)


class World:
    """Actors and a learner around a scene; what they assert is read from replies and the log."""

    def __init__(self, scene: Scene, publish_every: int) -> None:
        self.scene, self.config = scene, scene.config
        self.publish_every = publish_every
        self.actors = {name: Rollouts(2 * self.config.group_size + 1) for name in ("a", "b", "c")}
        self.incarnation, self.step = 1, 0
        self.published = (1, 0)
        self.again_until = 0  # the step up to which a resumed learner trains recorded batches
        self.history: dict[int, Batch] = {}
        self.delivered: list[tuple[str, Lease, int]] = []
        self.opened: dict[int, GroupOpened] = {}  # train groups
        self.dropped, self._seen = set[int](), 0

    @property
    def stopped(self) -> bool:
        return bool(self.scene.ledger.stop_cause)

    def do(self, act: Callable[..., Any], *arguments: object) -> Any:
        """Act on the scene; read the new records and hand out the leases that were pushed."""
        reply = act(*arguments)
        for fact in self.scene.log[self._seen :]:
            self._check_fact(fact)
        self._seen = len(self.scene.log)
        self.scene.leased.clear()
        for name in self.actors:
            for mail in self.scene.got.pop(name, []):
                for lease in mail.leases if isinstance(mail, Leases) else ():
                    self._take(name, lease)
        return reply

    def connect(self, name: str) -> None:
        """An actor says hello, with what it still has in flight."""
        actor = self.actors[name]
        if not actor.alive:
            actor.alive, actor.applied = True, self.published
        actor.connected = not self.stopped
        self.do(self.scene.send, name, Hello(name, "digest", tuple(sorted(actor.flight))))
        self.state(name)

    def state(self, name: str) -> None:
        """An actor states its capacity and weights."""
        actor = self.actors[name]
        if actor.connected:
            self.do(self.scene.send, name, Ready(name, actor.capacity, *actor.applied))

    def beat(self, name: str) -> None:
        """An actor's heartbeat, and its Hello where it is asked for one."""
        actor = self.actors[name]
        ready = Ready(name, actor.capacity, *actor.applied)
        beat = Heartbeat(name, {}, ready, tuple(sorted(actor.flight)))
        if actor.connected and self.do(self.scene.send, name, beat) == Unknown():
            self.connect(name)

    def deliver(self, name: str, key: Key, signal: bool = True) -> None:
        """An actor delivers something that it has in flight."""
        lease, version = self.actors[name].flight.pop(key)
        status = self.do(self.scene.deliver, name, lease, 1.0 + signal * lease.sibling, version)
        assert status in ("accepted", "superseded", "dropped")
        self.delivered.append((name, lease, version))

    def be_diligent(self, name: str) -> None:
        """An actor does all it can at once."""
        if not self.actors[name].connected:
            self.connect(name)
        self.actors[name].applied = self.published
        self.state(name)
        self.beat(name)
        for key in sorted(self.actors[name].flight):
            self.deliver(name, key)

    def train(self) -> None:
        """The learner asks for its next batch and, if there is one, trains and publishes."""
        reply = self.do(self.scene.sample, self.step, self.incarnation)
        if not isinstance(reply, Batch):
            assert isinstance(reply, Stop if self.stopped else Wait)
            assert self.stopped or self.step >= self.again_until, "a recorded batch must wait"
            return
        self._check_batch(reply)
        self.step += 1
        due = self.step > self.again_until and self.step % self.publish_every == 0
        if self.step == self.again_until or due:
            self.published = (self.incarnation, self.step)

    def _check_batch(self, batch: Batch) -> None:
        assert batch.step == self.step + 1
        assert list(batch.group_ids) == sorted(batch.group_ids)
        assert len(batch.group_ids) == self.config.groups_per_step
        assert not self.dropped & set(batch.group_ids)
        if batch.step <= self.again_until:
            assert composition(batch) == composition(self.history[batch.step])
        self.history[batch.step] = batch
        surviving = [i for step in range(1, batch.step + 1) for i in self.history[step].group_ids]
        assert len(surviving) == len(set(surviving)), "trained twice"
        for group_id, payloads in zip(batch.group_ids, batch.groups, strict=True):
            found = [decode_summary(payload) for payload in payloads]
            assert [s.sibling for s in found] == list(range(self.config.group_size))
            assert {(s.group_id, s.kind) for s in found} == {(group_id, "train")}
            assert self.step - min(s.oldest_version for s in found) <= self.config.max_staleness

    def _check_fact(self, fact: Record) -> None:
        if isinstance(fact, GroupDropped):
            self.dropped.add(fact.group_id)
        if isinstance(fact, GroupOpened):
            assert fact.incarnation == self.incarnation
        if isinstance(fact, GroupOpened) and fact.kind == "train":
            standing = len(self.opened.keys() - self.dropped)
            bound = (self.config.max_staleness + fact.version + 1) * self.config.groups_per_step
            assert standing < bound, "admission"
            self.opened[fact.group_id] = fact

    def _take(self, name: str, lease: Lease) -> None:
        actor, key = self.actors[name], (lease.group_id, lease.sibling)
        assert actor.connected, "leased to nobody"
        assert actor.applied[0] == self.incarnation, "leased to an old incarnation"
        assert not any(key in other.flight for other in self.actors.values() if other.connected)
        if lease.kind == "train":
            assert self.step >= self.again_until, "leased before the lost steps are trained again"
            assert actor.applied[1] >= self.opened[lease.group_id].version
        actor.flight[key] = (lease, actor.applied[1])


def composition(batch: Batch) -> tuple[object, ...]:
    """What must be the same when a batch is served again."""
    return batch.step, batch.group_ids, batch.versions, batch.groups


@pytest.fixture
def scene() -> Callable[..., Scene]:
    """`scene(evals=3, max_staleness=0)` sets a scene."""
    return Scene


@pytest.fixture
def tools() -> SimpleNamespace:
    """What a scene is made of, for tests that drive a ledger in their own way."""
    pieces = (Scene, World, Rollouts, summary_for, composition)
    return SimpleNamespace(**{piece.__name__: piece for piece in pieces})

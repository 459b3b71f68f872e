"""A scene for ledger tests: a real ledger, a clock set by hand, peers that remember their mail."""

from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from configs.schema import ReplayConfig
from replay.ledger.events import Event, Peer, PeerLost, Tick
from replay.ledger.ledger import Ledger
from replay.log.records import Record, ReplayRestarted, RunResumed
from replay.log.summary import Summary
from replay.protocol import (
    Deliver,
    Hello,
    Lease,
    LeaseFailed,
    Leases,
    Ready,
    Reply,
    Resume,
    Sample,
    Welcome,
)
from replay.questions import Questions
from replay.trajectory import Question, Sampling

Key = tuple[int, int]
USUAL = {"searches": 1, "malformed": 0, "turns": 2, "action_tokens": 9}


def make_questions(count: int, stem: str = "q") -> tuple[Question, ...]:
    """`count` questions, of one and two hops in turn."""
    return tuple(Question(f"{stem}-{i}", f"what {i} ?", (str(i),), 1 + i % 2) for i in range(count))


def summary_for(
    lease: Lease, reward: float | None = None, version: int = 0, **other: Any
) -> Summary:
    """Make the result of a rollout of this lease; sibling i is rewarded i unless told otherwise."""
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

    def __init__(
        self,
        evals: int = 0,
        questions: int = 50,
        eval_temperatures: tuple[float, ...] = (0.0, 1.0),
        **config: object,
    ) -> None:
        defaults = {"groups_per_step": 2, "group_size": 2, "max_staleness": 1}
        self.config = msgspec.convert(defaults | config, ReplayConfig)
        self.sizes, self.eval_temperatures = (questions, evals), eval_temperatures
        self.now, self.log = 1000.0, list[Record]()
        self.leased: dict[Peer, list[Lease]] = {}
        self.got: dict[Peer, list[Reply]] = {}
        self.ledger = self.fresh_ledger()

    def fresh_ledger(self) -> Ledger:
        """A ledger that has seen nothing."""
        questions, evals = make_questions(self.sizes[0]), make_questions(self.sizes[1], "e")
        supply, sampling = Questions(questions, seed=5), Sampling(temperature=0.9, seed=5)
        return Ledger(
            self.config,
            supply,
            evals,
            sampling,
            decode_summary,
            eval_temperatures=self.eval_temperatures,
        )

    def restart(self, resumed: bool = False, image: tuple[int, bytes] | None = None) -> None:
        """Replay is killed and started again on its log; `resumed`: all else was killed too;
        `image`: it begins with that of the ledger which had written so many records.
        """
        self.log.append(RunResumed(self.now, "") if resumed else ReplayRestarted(self.now))
        if resumed:
            self.leased.clear()
        self.ledger = self.fresh_ledger()
        first = 0
        if image is not None:
            first, data = image
            self.ledger.begin(data)
        self.ledger.restore(self.log[first:], self.payloads)

    def payloads(self, numbers: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """The payloads of these records."""
        for number in numbers:
            yield number, self.log[number].payload  # type: ignore[union-attr]

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
        return dict(self.ledger.state.counters.dropped)


@pytest.fixture
def scene() -> Callable[..., Scene]:
    """`scene(evals=3, max_staleness=0)` sets a scene."""
    return Scene


@pytest.fixture
def tools() -> SimpleNamespace:
    """Make the parts of a scene, for tests that drive a ledger in their own way."""
    pieces = (Scene, summary_for)
    return SimpleNamespace(**{piece.__name__: piece for piece in pieces})

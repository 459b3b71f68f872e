"""Actors and a learner as replay may meet them, for tests that drive a ledger in every way.

What they believe may differ from what replay has on record for as long as a message is lost: a
world keeps both apart and checks what each is told.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from replay.log.records import GroupDropped, GroupOpened, Record
from replay.protocol import Batch, Heartbeat, Hello, Lease, Leases, Ready, Stop, Unknown, Wait
from tests.replay.ledger.conftest import Key, Scene, decode_summary


@dataclass
class Rollouts:
    """One actor; `flight`: what it is rolling out, and the version under which it began;
    `delivering`: the same of what it delivered without an acknowledgement so far; `lost`: leases
    that it was given and never got.
    """

    capacity: int
    alive: bool = False
    connected: bool = False
    applied: tuple[int, int] = (1, 0)
    flight: dict[Key, tuple[Lease, int]] = field(default_factory=dict)
    delivering: dict[Key, tuple[Lease, int]] = field(default_factory=dict)
    lost: set[Key] = field(default_factory=set)


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
        actor.lost.clear()
        held, delivering = tuple(sorted(actor.flight)), tuple(sorted(actor.delivering))
        self.do(self.scene.send, name, Hello(name, "digest", held, delivering=delivering))
        self.state(name)
        for key in delivering:
            actor.flight[key] = actor.delivering.pop(key)
            self.deliver(name, key)

    def state(self, name: str) -> None:
        """An actor states its capacity and weights."""
        actor = self.actors[name]
        if actor.connected:
            self.do(self.scene.send, name, Ready(name, actor.capacity, *actor.applied))

    def beat(self, name: str) -> None:
        """An actor's heartbeat, and its Hello where it is asked for one."""
        actor = self.actors[name]
        ready = Ready(name, actor.capacity, *actor.applied)
        held, delivering = tuple(sorted(actor.flight)), tuple(sorted(actor.delivering))
        beat = Heartbeat(name, {}, ready, held, delivering)
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
            admitted = len(self.opened.keys() - self.dropped)
            bound = (self.config.max_staleness + fact.version + 1) * self.config.groups_per_step
            assert admitted < bound, "admission"
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
    """Return what must be the same when a batch is served again."""
    return batch.step, batch.group_ids, batch.versions, batch.groups

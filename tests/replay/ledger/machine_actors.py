"""The actors of the ledger's state machine: what may happen to them, and what must follow."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from replay.log.records import GroupOpened, QuestionRetired, Record
from replay.protocol import (
    Acknowledged,
    Deliver,
    Goodbye,
    Hello,
    Refused,
)
from tests.replay.ledger.conftest import Scene, summary_for
from tests.replay.ledger.world import Rollouts, World

NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)
picks = st.integers(0, 99)
running = precondition(lambda machine: not machine.world.stopped)


class Watch(World):
    """A world that also notices questions which are asked although they are retired."""

    def __init__(self, scene: Scene, publish_every: int) -> None:
        super().__init__(scene, publish_every)
        self.retired: set[str] = set()

    def _check_fact(self, fact: Record) -> None:
        super()._check_fact(fact)
        if isinstance(fact, QuestionRetired):
            self.retired.add(fact.question_id)
        if isinstance(fact, GroupOpened) and fact.kind == "train":
            assert fact.question.id not in self.retired, "asked although it is retired"


class ActorRules(RuleBasedStateMachine):
    """Rules are what may happen; `world` checks each batch, lease and opening."""

    scene: Scene
    world: Watch

    @rule(name=names)
    def connect(self, name: str) -> None:
        if not self.world.actors[name].connected:
            self.world.connect(name)

    @rule(name=names)
    def kill(self, name: str) -> None:
        self.world.actors[name] = Rollouts(self.world.actors[name].capacity)
        self.world.do(self.scene.lose, name)

    @rule(name=names)
    def leave(self, name: str) -> None:
        """An actor says goodbye; what it had is leased again."""
        if self.world.actors[name].connected:
            self.world.actors[name] = Rollouts(self.world.actors[name].capacity)
            self.world.do(self.scene.send, name, Goodbye(name))
            assert name not in self.scene.ledger.state.held

    @rule(name=names)
    def stall(self, name: str) -> None:
        """Replay gives the actor up, but it lives and keeps what it has in flight."""
        self.world.actors[name].connected = False
        self.world.do(self.scene.lose, name)

    @rule(name=names)
    def apply_published(self, name: str) -> None:
        if self.world.actors[name].alive:
            self.world.actors[name].applied = self.world.published
            self.world.state(name)

    @rule(name=names, capacity=st.sampled_from([0, 1, 3, 7]))
    def change_capacity(self, name: str, capacity: int) -> None:
        actor = self.world.actors[name]
        if actor.connected:
            actor.capacity = max(capacity, len(actor.flight))
            self.world.state(name)

    @rule(name=names, pick=picks, signal=st.booleans())
    def deliver(self, name: str, pick: int, signal: bool) -> None:
        if flight := sorted(self.world.actors[name].flight):
            self.world.deliver(name, flight[pick % len(flight)], signal)

    @rule(pick=picks)
    def deliver_without_signal(self, pick: int) -> None:
        """All that an actor has of one group, with one reward: nothing to learn from."""
        held = sorted((key, name) for name, a in self.world.actors.items() for key in a.flight)
        for (group_id, _), name in held[pick % max(1, len(held)) :][:1]:
            for key in sorted(key for key in self.world.actors[name].flight if key[0] == group_id):
                self.world.deliver(name, key, signal=False)

    @rule(pick=picks)
    def deliver_again(self, pick: int) -> None:
        if delivered := self.world.delivered:
            name, lease, version = delivered[pick % len(delivered)]
            status = self.world.do(self.scene.deliver, name, lease, 5.0, version)
            assert status in ("superseded", "dropped")

    @rule(name=names, pick=picks)
    def deliver_what_is_not_asked(self, name: str, pick: int) -> None:
        """Of a group that never was, and of another question than the group's."""
        flight = self.world.actors[name].flight
        if not flight:
            return
        key = sorted(flight)[pick % len(flight)]
        lease, wanted = flight[key][0], self.scene.ledger.state.unfinished(key[0])
        strange = msgspec.structs.replace(lease.question, id="of another run")
        never = msgspec.structs.replace(lease, group_id=10**15)
        for other in (never, msgspec.structs.replace(lease, question=strange)):
            payload = msgspec.msgpack.encode(summary_for(other))
            message = Deliver(name, other.group_id, other.sibling, payload)
            reply = self.unchanged(name, message)
            if other is not never and not wanted:
                assert isinstance(reply, Acknowledged) and reply.status != "accepted"
                del flight[key]  # its actor is told that nobody waits for it
            else:
                assert isinstance(reply, Refused)

    # ---- messages

    @rule(name=names, times=st.integers(1, 12))
    def beat(self, name: str, times: int) -> None:
        """Heartbeats, a second apart: what got lost is found out after `dead_after_s`."""
        for _ in range(times):
            self.world.beat(name)
            self.world.do(self.scene.tick, 1.0)

    @rule(name=names, pick=picks)
    def lose_leases(self, name: str, pick: int) -> None:
        """Leases were sent, and are on record, but never came."""
        actor = self.world.actors[name]
        if flight := sorted(actor.flight):
            actor.lost.add(key := flight[pick % len(flight)])
            del actor.flight[key]

    @rule(name=names, pick=picks)
    def lose_delivery(self, name: str, pick: int) -> None:
        """It never comes: its actor keeps it, and tells of it, until it is acknowledged."""
        actor = self.world.actors[name]
        if flight := sorted(actor.flight):
            key = flight[pick % len(flight)]
            actor.delivering[key] = actor.flight.pop(key)

    @rule(name=names, pick=picks)
    def lose_acknowledgement(self, name: str, pick: int) -> None:
        """Replay has the delivery, and its actor does not know that."""
        actor = self.world.actors[name]
        if actor.connected and (flight := sorted(actor.flight)):
            key = flight[pick % len(flight)]
            rollout = actor.flight[key]
            self.world.deliver(name, key)
            actor.delivering[key] = rollout

    @rule(name=names, pick=picks)
    def fail(self, name: str, pick: int) -> None:
        flight = self.world.actors[name].flight
        if flight:
            lease, _ = flight.pop(sorted(flight)[pick % len(flight)])
            self.world.do(self.scene.fail, name, lease)

    @rule(pick=picks)
    @running
    def fail_for_good(self, pick: int) -> None:
        """One sibling fails wherever it is leased again, until its question is given up."""
        keys = sorted(key for actor in self.world.actors.values() for key in actor.flight)
        if not keys:
            return
        key = keys[pick % len(keys)]
        group = self.scene.ledger.state.unfinished(key[0])
        while holders := [n for n, a in self.world.actors.items() if key in a.flight]:
            lease, _ = self.world.actors[holders[0]].flight.pop(key)
            self.world.do(self.scene.fail, holders[0], lease)
        state = self.scene.ledger.state
        if group and state.unfinished(key[0]) is None and key[1] in group.undelivered:
            assert key[0] in state.dropped
            assert group.kind == "eval" or group.question.id in self.world.retired

    @rule(name=names, rounds=st.integers(1, 5))
    def straggle(self, name: str, rounds: int) -> None:
        """One actor is slow while the others and the learner go on."""
        for _ in range(rounds):
            for other in sorted(self.world.actors.keys() - {name}):
                self.world.be_diligent(other)
            self.world.train()

    @rule(name=names)
    @running
    def twin(self, name: str) -> None:
        """A second process with the id of an actor, and an actor of another model."""
        if self.world.actors[name].connected:
            assert isinstance(self.unchanged("twin", Hello(name, "digest")), Refused)
            assert isinstance(self.unchanged("twin", Hello("d", "other")), Refused)
            self.world.beat(name)

    def unchanged(self, peer: str, message: Any) -> Any:
        """The reply to a message that, where it is refused, must leave nothing on record."""
        before = len(self.scene.log)
        reply = self.world.do(self.scene.send, peer, message)
        assert len(self.scene.log) == before or isinstance(reply, Acknowledged)
        return reply

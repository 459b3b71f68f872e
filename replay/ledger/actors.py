"""Replay's decisions about actors: each of their messages becomes facts and direct replies.

The first durable delivery of a sibling wins, whoever makes it. Leases are pushed apart, by
`replay.ledger.leasing`.
"""

from collections import deque
from collections.abc import Callable

import replay.protocol as wire
from replay.ledger.bounds import why_not_sampled
from replay.ledger.events import Peer
from replay.ledger.groups import Group
from replay.ledger.lifecycle import drop_if_failing, settle_closed, stop_failing
from replay.ledger.roster import Roster
from replay.ledger.state import Journal
from replay.log import records
from replay.log.summary import Summary
from replay.trajectory import Search

Summarise = Callable[[bytes], Summary]
MOST_SHOWN = 2  # rollouts, by the console
Replies = list[tuple[Peer, wire.Reply]]


class ActorHandler:
    """One method per message of an actor."""

    def __init__(self, journal: Journal, roster: Roster, summarise: Summarise) -> None:
        self._journal = journal
        self._state = journal.state
        self._roster = roster
        self._summarise = summarise
        self.evaluated: deque[wire.Evaluated] = deque(maxlen=MOST_SHOWN)  # the newest; not durable

    def hello(self, peer: Peer, message: wire.Hello) -> Replies:
        """Take an actor in, with the leases that it holds; they are never leased to another.

        What it is delivering stays as it is on record: its delivery has come, or comes again.
        """
        if cause := self._why_refused(peer, message):
            return [(peer, wire.Refused(cause))]
        actor_id, now = message.actor_id, self._journal.now
        held, recorded = set(message.held), set(self._state.held.get(actor_id, ()))
        self._roster.join(actor_id, peer, message.instance, message.node)
        joined = records.ActorJoined(now, actor_id, message.tokenizer_digest, message.node)
        self._journal.write(joined)
        self._return(actor_id, recorded - held - set(message.delivering), "not_held")
        for group_id, sibling in sorted(held - recorded):
            self._journal.write(records.Adopted(now, actor_id, group_id, sibling))
        return [(peer, wire.Welcome()), *self._stop(peer)]

    def ready(self, peer: Peer, message: wire.Ready) -> Replies:
        """Note the capacity and the weights that an actor states."""
        actor = self._roster.get(message.actor_id)
        if actor is None or actor.peer != peer or actor.doubted:
            return [(peer, wire.Unknown())]
        actor.capacity = message.capacity
        actor.incarnation = message.incarnation
        actor.version = message.policy_version
        return []

    def heartbeat(self, peer: Peer, message: wire.Heartbeat) -> Replies:
        """Keep an actor's latest gauges, and find out what got lost on the way to it or from it.

        Its messages come in order: a lease on record that it does not name was lost, or is on its
        way to it; what it still delivers was lost, or its acknowledgement was or is on its way.
        After `dead_after_s` nothing is on its way: it is given nothing and asked for a Hello.
        """
        actor = self._roster.get(message.actor_id)
        if actor is None or actor.peer != peer or actor.doubted:
            return [(peer, wire.Unknown())]
        actor.gauges = message.gauges
        recorded = self._state.held.get(message.actor_id, set())
        unsettled = recorded.difference(message.held).union(message.delivering)
        actor.settle(unsettled, self._journal.now, self._state.config.dead_after_s)
        if actor.doubted:
            actor.capacity = 0
            return [(peer, wire.Unknown())]
        stated = self.ready(peer, message.ready) if message.ready else []
        return stated + self._stop(peer)

    def deliver(self, peer: Peer, message: wire.Deliver) -> Replies:
        """Record the first delivery of a sibling; acknowledge every one. Raises CodecError."""
        summary = self._summarise(message.payload)
        group = self._state.unfinished(message.group_id)
        if cause := why_not_sampled(self._state, summary):
            return [(peer, wire.Refused(cause))]
        if group is None:
            status = "dropped" if message.group_id in self._state.dropped else "superseded"
            return [(peer, self._not_needed(message, status))]
        if cause := _why_foreign(group, message, summary):
            return [(peer, wire.Refused(cause))]
        if message.sibling in group.summaries:
            return [(peer, self._not_needed(message, "superseded"))]
        return [(peer, self._take(group, message, summary))]

    def lease_failed(self, peer: Peer, message: wire.LeaseFailed) -> Replies:
        """Take a lease back whose rollout died: its sibling is to be leased again. Of its holder
        alone: failures retire questions.
        """
        if not self._speaks_for(peer, message.actor_id, message.instance):
            return [(peer, wire.Unknown())]
        lease = {(message.group_id, message.sibling)}
        self._return(message.actor_id, lease, message.cause, message.searches)
        return []

    def goodbye(self, peer: Peer, message: wire.Goodbye) -> Replies:
        """Let an actor go; the leases that it still holds are given again."""
        if self._speaks_for(peer, message.actor_id):
            self.dismiss(message.actor_id, "goodbye")
        return []

    def lost(self, peer: Peer, cause: str) -> None:
        """Give up an actor whose connection is dead or silent."""
        if actor := self._roster.at(peer):
            self.dismiss(actor.actor_id, cause)

    def dismiss_absent(self) -> None:
        """Give up actors that hold leases on record but did not return after replay's restart."""
        for actor_id in [name for name in self._state.held if name not in self._roster]:
            self.dismiss(actor_id, "absent")

    def dismiss(self, actor_id: str, cause: str) -> None:
        """Forget an actor and return what it holds."""
        self._roster.leave(actor_id)
        self._return(actor_id, set(self._state.held.get(actor_id, ())), cause)
        self._journal.write(records.ActorLeft(self._journal.now, actor_id, cause))

    def _speaks_for(self, peer: Peer, actor_id: str, instance: str = "") -> bool:
        """True for an actor, also before it said Hello again: over a new connection by its
        instance, which it alone knows, or where replay was started again.
        """
        actor = self._roster.get(actor_id)
        if actor is None:
            return actor_id in self._state.held
        return actor.peer == peer or (bool(instance) and actor.instance == instance)

    def _stop(self, peer: Peer) -> Replies:
        return [(peer, wire.Stop(self._state.stop_cause))] if self._state.stop_cause else []

    def _why_refused(self, peer: Peer, message: wire.Hello) -> str:
        if message.protocol != wire.PROTOCOL:
            return f"replay speaks protocol {wire.PROTOCOL}, {message.actor_id} {message.protocol}"
        known = self._roster.get(message.actor_id)
        moved = known is not None and bool(message.instance) and known.instance == message.instance
        if known is not None and known.peer != peer and not moved:
            return f"{message.actor_id} is connected already: every actor needs its own id"
        digest = self._state.tokenizer_digest
        if digest and message.tokenizer_digest != digest:
            return (
                f"{message.actor_id} has tokenizer {message.tokenizer_digest}, the first actor "
                f"{digest}: give all the same model folder"
            )
        return ""

    def _return(
        self,
        actor_id: str,
        leases: set[tuple[int, int]],
        cause: str,
        searches: tuple[Search, ...] = (),
    ) -> None:
        now = self._journal.now
        for group_id, sibling in sorted(leases):
            if (group_id, sibling) in self._state.held.get(actor_id, ()):
                self._journal.write(
                    records.LeaseReturned(now, actor_id, group_id, sibling, cause, searches)
                )
                drop_if_failing(self._journal, group_id)
                stop_failing(self._journal, cause)

    def _not_needed(self, message: wire.Deliver, status: str) -> wire.Acknowledged:
        self._journal.write(
            records.Superseded(
                self._journal.now, message.actor_id, message.group_id, message.sibling, status
            )
        )
        return wire.Acknowledged(message.group_id, message.sibling, status)

    def _take(self, group: Group, message: wire.Deliver, summary: Summary) -> wire.Acknowledged:
        if group.kind == "train" and summary.oldest_version < group.version:
            # Training on it would break the bound that admission keeps by the group's version.
            cause = f"sampled under version {summary.oldest_version} < {group.version}"
            self._return(message.actor_id, {(group.group_id, message.sibling)}, cause)
            return wire.Acknowledged(group.group_id, message.sibling, "dropped")
        self._journal.write(
            records.Delivered(
                self._journal.now,
                message.actor_id,
                message.group_id,
                message.sibling,
                message.payload,
                summary,
            )
        )
        if group.kind == "eval":
            self.evaluated.append(wire.Evaluated(group.question, message.payload))
        if group.closed:
            settle_closed(self._journal, group)
        return wire.Acknowledged(group.group_id, message.sibling, "accepted")


def _why_foreign(group: Group, message: wire.Deliver, summary: Summary) -> str:
    expected = (group.group_id, message.sibling, group.question.id, group.kind)
    found = (summary.group_id, summary.sibling, summary.question_id, summary.kind)
    if found != expected or not 0 <= message.sibling < group.size:
        return f"delivery for {expected} of {group.size} siblings holds a trajectory of {found}"
    return ""

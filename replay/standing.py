"""An actor's session with replay: its leases, and whether the replay that answers knows it.

Pure: times are given, in monotonic seconds.

All messages of an actor travel in order on one connection, which outlives replay's process. So a
lease that was given back before a Hello needs no repetition: wherever LeaseFailed got lost, the
Hello no longer names the lease, and replay returns what is not held. A delivery from before a Hello
that is still unacknowledged when the Welcome comes was lost, and is sent again; none else is. Of
several Hellos until a Welcome the first counts, as nobody knows which one it answers; what was lost
behind that one, the heartbeats tell replay, which asks for another Hello.
"""

import uuid
from collections.abc import Mapping

import msgspec

import replay.protocol as wire
from replay.inbox import Key

HELLO_AGAIN_S = 1.0  # a Hello not welcomed by then was lost, or its Welcome was


class Session:
    """The leases of an actor, and its introductions.

    `held`: leases that are worked on; `known`: replay has said Welcome and not Unknown since.
    """

    def __init__(self, hello: wire.Hello) -> None:
        self.held: set[Key] = set()
        self.known = False
        self._hello = msgspec.structs.replace(hello, instance=hello.instance or uuid.uuid4().hex)
        self._ready: wire.Ready | None = None
        self._delivering: dict[Key, wire.Deliver] = {}
        self._doubtful: tuple[Key, ...] = ()  # delivered before the Hello
        self._introduced_s = float("-inf")

    def hello(self, now_s: float) -> wire.Hello:
        """Return the introduction, with the leases of now."""
        if self.known:
            self._doubtful = tuple(self._delivering)
        self.known, self._introduced_s = False, now_s
        held, delivering = self._leases()
        return msgspec.structs.replace(self._hello, held=held, delivering=delivering)

    def unknown(self, now_s: float) -> wire.Hello | None:
        """Note that replay does not know this actor; return the Hello to say, unless one is under
        way.
        """
        return self.hello(now_s) if self.known else self.alive(now_s)

    def alive(self, now_s: float) -> wire.Hello | None:
        """Return the Hello to say again, where replay lives and has not welcomed one for long."""
        late = not self.known and now_s - self._introduced_s >= HELLO_AGAIN_S
        return self.hello(now_s) if late else None

    def heartbeat(self, gauges: Mapping[str, float]) -> wire.Heartbeat:
        """Return the actor's numbers, last statement and leases."""
        held, delivering = self._leases()
        return wire.Heartbeat(self._hello.actor_id, dict(gauges), self._ready, held, delivering)

    def welcomed(self) -> list[wire.FromActor]:
        """Note that replay knows this actor; return what it must be told again."""
        if self.known:
            return []
        self.known = True
        lost = (self._delivering.get(key) for key in self._doubtful)
        return [message for message in (*lost, self._ready) if message is not None]

    def ready(self, statement: wire.Ready) -> bool:
        """Keep the last statement; return True if replay can be told now."""
        self._ready = statement
        return self.known

    def deliver(self, delivery: wire.Deliver) -> None:
        """Note that a rollout is finished and its trajectory goes out."""
        key = delivery.group_id, delivery.sibling
        self.held.discard(key)
        self._delivering[key] = delivery

    def abandon(self, key: Key) -> None:
        """Forget a delivery whose acknowledgement nobody awaits."""
        self._delivering.pop(key, None)

    def hear(self, reply: wire.Reply) -> wire.Reply:
        """Note what was leased, and what is on record; return the reply without leases that are
        worked on already: none is begun twice.
        """
        if isinstance(reply, wire.Leases):
            new = {(x.group_id, x.sibling): x for x in reply.leases}
            new = {key: lease for key, lease in new.items() if key not in self.held}
            self.held.update(new)
            return wire.Leases(tuple(new.values()))
        if isinstance(reply, wire.Acknowledged):
            self.abandon((reply.group_id, reply.sibling))
        return reply

    def _leases(self) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        return tuple(sorted(self.held)), tuple(sorted(self._delivering))

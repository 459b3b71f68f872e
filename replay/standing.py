"""What an actor is to replay: what it holds, and whether the replay that answers knows it.

Consumes what the actor sends and hears; produces the messages that a replay started again needs.
Pure: times are given, in monotonic seconds.

All messages of an actor travel in order on one connection, which outlives replay's process. So a
lease that was given back before a Hello needs no repetition: wherever LeaseFailed got lost, the
Hello no longer names the lease, and replay returns what is not held. A delivery from before a Hello
that is still unacknowledged when the Welcome comes was lost, and is sent again; none else is.
"""

import uuid

import msgspec

from replay.inbox import Key
from replay.protocol import Acknowledged, Deliver, FromActor, Hello, Leases, Ready, Reply

HELLO_AGAIN_S = 1.0  # a Hello not welcomed by then was lost, where its actor is still unknown


class Standing:
    """`held`: leases that are worked on; `known`: replay has said Welcome and not Unknown since."""

    def __init__(self, hello: Hello) -> None:
        self.held: set[Key] = set()
        self.known = False
        self._hello = msgspec.structs.replace(hello, instance=hello.instance or uuid.uuid4().hex)
        self._ready: Ready | None = None
        self._delivering: dict[Key, Deliver] = {}
        self._doubtful: tuple[Key, ...] = ()  # delivered before the last Hello
        self._introduced_s = float("-inf")

    def hello(self, now_s: float) -> Hello:
        """The introduction as things stand."""
        self.known, self._introduced_s = False, now_s
        self._doubtful = tuple(self._delivering)
        return msgspec.structs.replace(
            self._hello, held=tuple(sorted(self.held)), delivering=tuple(sorted(self._delivering))
        )

    def unknown(self, now_s: float) -> Hello | None:
        """Replay does not know this actor: the Hello to say, unless one is under way."""
        if self.known or now_s - self._introduced_s >= HELLO_AGAIN_S:
            return self.hello(now_s)
        return None

    def welcomed(self) -> list[FromActor]:
        """Replay knows this actor from now on: what it must be told again."""
        if self.known:
            return []
        self.known = True
        lost = [self._delivering[key] for key in self._doubtful if key in self._delivering]
        return [*lost, *([self._ready] if self._ready else [])]

    def ready(self, statement: Ready) -> bool:
        """Keep the last statement; whether replay can be told now."""
        self._ready = statement
        return self.known

    def deliver(self, delivery: Deliver) -> None:
        """A rollout is finished and its trajectory goes out."""
        key = delivery.group_id, delivery.sibling
        self.held.discard(key)
        self._delivering[key] = delivery

    def abandon(self, key: Key) -> None:
        """Nobody awaits the acknowledgement of this delivery any more."""
        self._delivering.pop(key, None)

    def hear(self, reply: Reply) -> None:
        """Note what was leased, and what is on record."""
        if isinstance(reply, Leases):
            self.held.update((lease.group_id, lease.sibling) for lease in reply.leases)
        elif isinstance(reply, Acknowledged):
            self.abandon((reply.group_id, reply.sibling))

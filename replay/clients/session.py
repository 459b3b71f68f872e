"""An actor's session with replay: its leases, whether the replay that answers knows it, and the
inbox of what has come and is not taken yet. Times are given, in monotonic seconds.

All messages of an actor travel in order on one connection, which outlives replay's process. So a
lease that was given back before a Hello needs no repetition: where LeaseFailed got lost, the
Hello no longer names the lease, and replay returns what is not held. A delivery from before a Hello
that is still unacknowledged when the Welcome comes was lost, and is sent again; no other is. Of
several Hellos before a Welcome the first counts, as nobody knows which one the Welcome answers; the
heartbeats tell replay what was lost after it, and replay asks for another Hello.
"""

import asyncio
import uuid
from collections.abc import Mapping

import msgspec

import replay.protocol as wire

HELLO_AGAIN_S = 1.0  # a Hello not welcomed by then was lost, or its Welcome was
Key = tuple[int, int]  # group_id, sibling


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

    @property
    def instance(self) -> str:
        """The name drawn by this process."""
        return self._hello.instance

    def hello(self, now_s: float) -> wire.Hello:
        """Return the introduction, with the leases of now."""
        if self.known:
            self._doubtful = tuple(self._delivering)
        self.known, self._introduced_s = False, now_s
        held, delivering = self._leases()
        return msgspec.structs.replace(self._hello, held=held, delivering=delivering)

    def unknown(self, now_s: float) -> wire.Hello | None:
        """Note that replay does not know this actor; return the Hello to say, if none is out."""
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
        """Note a reply; return it without the leases that are worked on: none is begun twice."""
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


class Inbox:
    """Leases in order, then Stop for ever; one future per delivery under way.

    A wait ends with its reply, with Stop or with the error that `fail` was given.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._items: asyncio.Queue[wire.Lease | wire.Stop | BaseException] = asyncio.Queue()
        self._acknowledgements: dict[Key, asyncio.Future[str]] = {}

    async def next(self) -> wire.Lease | wire.Stop:
        """Wait for the next lease, or Stop; raise what `fail` was given."""
        item = await self._items.get()
        if isinstance(item, wire.Lease):
            return item
        self._items.put_nowait(item)
        if isinstance(item, wire.Stop):
            return item
        raise item

    def expect(self, key: Key) -> "asyncio.Future[str]":
        """Return a future of the status of the delivery of `key`, once it is acknowledged."""
        future = asyncio.get_running_loop().create_future()
        return self._acknowledgements.setdefault(key, future)

    def forget(self, key: Key) -> None:
        """Forget an acknowledgement that nobody awaits."""
        self._acknowledgements.pop(key, None)

    def take(self, reply: wire.Reply) -> list[wire.Lease]:
        """File a reply; return the leases that go back because Stop came before they were begun.

        Raises RefusedByReplay on Refused.
        """
        match reply:
            case wire.Leases(leases):
                for lease in leases:
                    self._items.put_nowait(lease)
            case wire.Acknowledged(group_id, sibling, status):
                future = self._acknowledgements.get((group_id, sibling))
                if future is not None and not future.done():
                    future.set_result(status)
            case wire.Stop():
                return self._stop(reply)
            case wire.Alive():
                pass
            case wire.Refused(cause):
                raise wire.RefusedByReplay(cause)
            case _:
                raise wire.RefusedByReplay(f"replay sent an actor {type(reply).__name__}")
        return []

    def fail(self, error: BaseException) -> None:
        """Make every wait raise `error`; the first one counts."""
        if self.error is not None:
            return
        self.error = error
        while not self._items.empty():
            self._items.get_nowait()
        self._items.put_nowait(error)
        for future in self._acknowledgements.values():
            if not future.done():
                future.set_exception(error)

    def _stop(self, stop: wire.Stop) -> list[wire.Lease]:
        waiting = [self._items.get_nowait() for _ in range(self._items.qsize())]
        self._items.put_nowait(stop)
        return [item for item in waiting if isinstance(item, wire.Lease)]

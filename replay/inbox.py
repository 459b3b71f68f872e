"""The inbox of an actor: what replay has sent and the actor has not taken yet."""

import asyncio

import replay.protocol as wire
from replay.protocol import Lease, Stop

Key = tuple[int, int]  # group_id, sibling


class Inbox:
    """Leases in order, then Stop for ever; one future per delivery under way.

    A wait ends with its reply, with Stop or with the error that `fail` was given.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._items: asyncio.Queue[Lease | Stop | BaseException] = asyncio.Queue()
        self._acknowledgements: dict[Key, asyncio.Future[str]] = {}

    async def next(self) -> Lease | Stop:
        """Wait for the next lease, or Stop; raise what `fail` was given."""
        item = await self._items.get()
        if isinstance(item, Lease):
            return item
        self._items.put_nowait(item)
        if isinstance(item, Stop):
            return item
        raise item

    def expect(self, key: Key) -> "asyncio.Future[str]":
        """Return a future of the status of the delivery of `key`, once it is acknowledged."""
        future = asyncio.get_running_loop().create_future()
        return self._acknowledgements.setdefault(key, future)

    def forget(self, key: Key) -> None:
        """Forget an acknowledgement that nobody awaits."""
        self._acknowledgements.pop(key, None)

    def take(self, reply: wire.Reply) -> list[Lease]:
        """File a reply; return the leases that go back, as Stop came before they were begun.

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
            case Stop():
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

    def _stop(self, stop: Stop) -> list[Lease]:
        waiting = [self._items.get_nowait() for _ in range(self._items.qsize())]
        self._items.put_nowait(stop)
        return [item for item in waiting if isinstance(item, Lease)]

"""A cache of asynchronous results with single-flight requests: any number of callers of one key
share one request. Errors are not cached. All callers are of one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """The last `size` values by key; `saved` counts the calls without a request of their own."""

    def __init__(self, size: int) -> None:
        self.saved = 0
        self._size = size
        self._known: OrderedDict[K, V] = OrderedDict()
        self._asked: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, ask: Callable[[K], Awaitable[V]]) -> V:
        """Return the key's value, from `ask` where it is neither cached nor being asked for. A
        cancelled caller leaves the request to the others.
        """
        if key in self._known:
            self._known.move_to_end(key)
            self.saved += 1
            return self._known[key]
        if (task := self._asked.get(key)) is not None:
            self.saved += 1
        else:
            task = self._asked[key] = asyncio.create_task(self._ask(key, ask))
            # Perhaps nobody waits for its error any more.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel open requests."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: K, ask: Callable[[K], Awaitable[V]]) -> V:
        try:
            value = await ask(key)
        finally:
            del self._asked[key]
        if self._size:
            self._known[key] = value
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return value

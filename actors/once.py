"""What is known by key, and what is being found out: asked for once by any number of askers.

Consumes keys and the means to ask; produces values. Waits for who asks; unblocked by the value, or
by what was raised, which nobody remembers. Of one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Once(Generic[K, V]):
    """The last `size` values by key; `spared` counts the askers who had nothing asked."""

    def __init__(self, size: int) -> None:
        self.spared = 0
        self._size = size
        self._known: OrderedDict[K, V] = OrderedDict()
        self._asked: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, ask: Callable[[K], Awaitable[V]]) -> V:
        """The key's value; `ask` is called when nobody knows it or is asking already. An asker who
        is cancelled leaves the question to the others.
        """
        if key in self._known:
            self._known.move_to_end(key)
            self.spared += 1
            return self._known[key]
        if (task := self._asked.get(key)) is not None:
            self.spared += 1
        else:
            task = self._asked[key] = asyncio.create_task(self._ask(key, ask))
            task.add_done_callback(_look)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Abandon what is being asked."""
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


def _look(task: "asyncio.Task[V]") -> None:
    if not task.cancelled():
        task.exception()  # perhaps nobody waits for it any more

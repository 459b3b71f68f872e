"""Cache of a client's results, with one request for any number of callers of the same query.

Results are of one version of the index: when another answers, the cache is emptied. It is not
`actors.rewards.single_flight`, which asks for one key at a time: here many queries go in one call,
each of which may be known, on its way for another caller, or new.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from retrieval_server.protocol import RETRIED, Passage

CHARS = 64 << 20  # of all passages that a cache holds: pages may be long

Found = list[Passage]
_Key = tuple[str, int]  # query, top_k


class QueryCache:
    """The last `size` results by query, `chars` of text at most, and what is on its way; of one
    event loop.
    """

    def __init__(self, size: int, chars: int = CHARS) -> None:
        self.remembered = self.shared = 0  # queries that were not asked for, and why
        self._size, self._version = size, ""
        self._most_chars, self._chars = chars, 0
        self._known: OrderedDict[_Key, Found] = OrderedDict()
        self._asked: dict[_Key, asyncio.Future[Found]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of_version(self, version: str) -> None:
        """Note the index version of the results to come; "" (unknown): cache nothing."""
        if version != self._version:
            self._version = version
            self._known.clear()
            self._chars = 0

    async def get(
        self,
        queries: Sequence[str],
        top_k: int,
        ask: Callable[[list[str]], Awaitable[list[Found]]],
        again: bool = True,
    ) -> list[Found]:
        """The passages of each query; `ask` is called with the new ones, in order.

        With `again` it is called once more with those that another caller, with a deadline of its
        own, has asked for in vain.
        """
        version = self._version
        found, awaited, new = self._look_up(queries, top_k)
        known = [*found]
        if new:  # in a task of its own: whoever asked first may be cancelled
            self._start(self._ask(new, top_k, ask))
        failed: list[str] = []
        for query, future in awaited.items():
            try:
                found[query] = await asyncio.shield(future)
            except RETRIED:
                if query in new or not again:
                    raise
                failed.append(query)
        if failed:
            found |= zip(failed, await self.get(failed, top_k, ask, again=False), strict=True)
        if known and self._version != version:  # they are of the index before
            found |= zip(known, await self.get(known, top_k, ask, again), strict=True)
        return [found[query] for query in queries]

    def _look_up(
        self, queries: Sequence[str], top_k: int
    ) -> tuple[dict[str, Found], dict[str, "asyncio.Future[Found]"], list[str]]:
        """Split the queries into known results, results that are asked for, and new queries."""
        found: dict[str, Found] = {}
        awaited: dict[str, asyncio.Future[Found]] = {}
        new: list[str] = []
        for query in dict.fromkeys(queries):
            key = (query, top_k)
            if key in self._known:
                self._known.move_to_end(key)
                found[query] = self._known[key]
                self.remembered += 1
            elif key in self._asked:
                awaited[query] = self._asked[key]
                self.shared += 1
            else:
                awaited[query] = self._asked[key] = asyncio.get_running_loop().create_future()
                new.append(query)
        self.shared += len(queries) - len(found) - len(awaited)
        return found, awaited, new

    async def close(self) -> None:
        """Abandon what is on its way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in self._asked.values():  # whose task had not begun
            future.cancel()
        self._asked.clear()

    def _start(self, asking: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(asking)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(
        self, queries: list[str], top_k: int, ask: Callable[[list[str]], Awaitable[list[Found]]]
    ) -> None:
        futures = [self._asked[query, top_k] for query in queries]
        version = self._version
        try:
            rows = await ask(queries)
        except BaseException as error:
            for future in futures:
                _fail(future, error)
            if not isinstance(error, Exception):
                raise
        else:
            same = self._version == version or not version
            for query, future, row in zip(queries, futures, rows, strict=True):
                if same:
                    self._keep((query, top_k), row)
                if not future.done():
                    future.set_result(row)
        finally:
            for query in queries:
                del self._asked[query, top_k]

    def _keep(self, key: _Key, row: Found) -> None:
        if self._size and self._version:
            self._known[key] = row
            self._chars += _chars(row)
            while len(self._known) > self._size or self._chars > self._most_chars:
                self._chars -= _chars(self._known.popitem(last=False)[1])


def _chars(row: Found) -> int:
    return sum(len(passage.contents) for passage in row)


def _fail(future: "asyncio.Future[Found]", error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, asyncio.CancelledError):
        future.cancel()
    else:
        future.set_exception(error)
        future.exception()  # perhaps nobody waits for it any more

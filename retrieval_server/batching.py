"""Micro-batches of concurrent searches: the server's for its index, the client's for its POSTs.

At most `max_running` batches are under way. The next one starts at once where none is, else when it
is full, after `max_wait_s`, or when a running one ends. At most `max_waiting` queries wait (a long
one counts once for each `LONG_CHARS`); further ones are refused at once. A batch that is refused is
asked again one call at a time, for one caller's bad query is not another's.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, Self, TypeVar

from retrieval_server.protocol import RetrievalOverloaded, RetrievalRefused

LONG_CHARS = 1024
T = TypeVar("T")
Run = Callable[[list[str], int], Awaitable[list[list[T]]]]


class _Call(NamedTuple, Generic[T]):
    """One `search` waiting for its part of a batch."""

    queries: Sequence[str]
    top_k: int
    results: asyncio.Future[list[list[T]]]
    load: int
    alone: bool = False  # it was refused together with others


class Batcher(Generic[T]):
    """Micro-batches searches; use as `async with`, from one event loop.

    `run(queries, top_k)` returns one list per query, at most `top_k` long, best first; it is called
    with what one turn of the event loop brought when nothing runs, else with what gathered in
    `max_wait_s`; in either case with at most `max_batch` queries, unless one call brought more.
    """

    def __init__(
        self,
        run: Run[T],
        *,
        max_batch: int,
        max_wait_s: float = 0.0,
        max_running: int = 1,
        max_waiting: int | None = None,
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._run_s = 0.0  # how long the last call took
        self._waiting: deque[_Call[T]] = deque()
        self._waiting_queries = self._waiting_load = 0
        self._running: set[asyncio.Future[list[list[T]]]] = set()
        self._deadline: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abandon what is waiting and what is running."""
        if self._deadline is not None:
            self._deadline.cancel()
        for call in self._waiting:
            call.results.cancel()
        self._waiting.clear()
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    @property
    def waiting(self) -> int:
        """Queries that no call has taken yet."""
        return self._waiting_queries

    @property
    def backlog_s(self) -> float:
        """Seconds that the waiting queries will take, going by the last call."""
        return self._run_s * -(-self._waiting_queries // self._max_batch)

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[T]]:
        """Per query at most `top_k` results, best first; raises what `run` raised, and
        RetrievalOverloaded when too much is waiting already.

        A caller that stops waiting is not searched for, unless that has begun.
        """
        if not queries:
            return []
        load = _load(queries)
        limit = self._max_waiting
        if self._waiting and limit is not None and self._waiting_load + load > limit:
            raise RetrievalOverloaded(
                f"{self._waiting_queries} queries are waiting, of at most {limit}", self.backlog_s
            )
        call = _Call[T](queries, top_k, asyncio.get_running_loop().create_future(), load)
        self._waiting.append(call)
        self._waiting_queries += len(queries)
        self._waiting_load += load
        self._schedule()
        return await call.results

    def _schedule(self) -> None:
        if len(self._running) >= self._max_running:
            return
        if self._waiting_queries >= self._max_batch:
            self._start()
        elif self._deadline is None:
            wait_s = self._max_wait_s if self._running else 0.0
            self._deadline = asyncio.get_running_loop().call_later(wait_s, self._start)

    def _start(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if not (calls := self._take()):
            return
        begun = time.monotonic()
        queries = [query for call in calls for query in call.queries]
        # A smaller top_k is a prefix of a larger one, so one call serves them all.
        running = asyncio.ensure_future(self._run(queries, max(call.top_k for call in calls)))
        self._running.add(running)
        running.add_done_callback(partial(self._finish, calls, begun))
        if self._waiting:
            self._schedule()

    def _take(self) -> list[_Call[T]]:
        calls: list[_Call[T]] = []
        size = 0
        while self._waiting:
            call = self._waiting[0]
            gone = call.results.done()  # its caller has given up
            full = size + len(call.queries) > self._max_batch
            if not gone and calls and (full or call.alone or calls[-1].alone):
                break
            self._waiting.popleft()
            self._waiting_queries -= len(call.queries)
            self._waiting_load -= call.load
            if not gone:
                calls.append(call)
                size += len(call.queries)
        return calls

    def _finish(
        self, calls: list[_Call[T]], begun: float, running: asyncio.Future[list[list[T]]]
    ) -> None:
        self._run_s = time.monotonic() - begun
        self._running.discard(running)
        if len(calls) > 1 and _refused(running):
            self._waiting.extendleft(call._replace(alone=True) for call in reversed(calls))
            self._waiting_queries += sum(len(call.queries) for call in calls)
            self._waiting_load += sum(call.load for call in calls)
            self._start()
            return
        begin = 0
        for call in calls:
            end = begin + len(call.queries)
            if not call.results.done():  # its caller may have gone
                _settle(call, running, begin, end)
            begin = end
        if self._waiting:
            self._start()


def _load(queries: Sequence[str]) -> int:
    return len(queries) + sum([len(query) for query in queries]) // LONG_CHARS


def _refused(running: asyncio.Future[list[list[T]]]) -> bool:
    return not running.cancelled() and isinstance(running.exception(), RetrievalRefused)


def _settle(call: _Call[T], running: asyncio.Future[list[list[T]]], begin: int, end: int) -> None:
    if running.cancelled():
        call.results.cancel()
    elif (error := running.exception()) is not None:
        call.results.set_exception(error)
    else:
        call.results.set_result([found[: call.top_k] for found in running.result()[begin:end]])

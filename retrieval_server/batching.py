"""Micro-batches of concurrent searches, such as a client's for its POSTs.

At most `max_running` batches are under way. The next one starts at once where none is, else when it
is full, after `max_wait_s`, or when a running one ends. The oldest calls go first, but those with
less than half of their time left last, the newest of them first: under overload, who is asked for
is then answered in time. A batch that is refused is asked again one call at a time, for one
caller's bad query is not another's. The calls of one that meets an overload wait with the others:
no more batches are begun than were under way beside it, one at least (a window as TCP's, that grows
by one for as many successes as it allows batches),
so that what waits here goes when there is room.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Self, TypeVar

from retrieval_server.protocol import RetrievalOverloaded, RetrievalRefused

T = TypeVar("T")
Run = Callable[[list[str], int, float], Awaitable[list[list[T]]]]


@dataclass(frozen=True, eq=False)
class _Call(Generic[T]):
    """One `search` waiting for its part of a batch."""

    queries: Sequence[str]
    top_k: int
    results: asyncio.Future[list[list[T]]]
    begun: float  # of the monotonic clock, as is the deadline
    deadline: float
    alone: bool = False  # it was refused together with others

    def is_late(self, now: float) -> bool:
        """True where less than half of its time is left."""
        return now - self.begun > self.deadline - now


class Batcher(Generic[T]):
    """Micro-batches searches; use as `async with`, from one event loop.

    `run(queries, top_k, deadline)` returns one list per query, at most `top_k` long, best first;
    nobody waits for it beyond the deadline (of the monotonic clock). It is called with what one
    turn of the event loop brought when nothing runs, else with what gathered in `max_wait_s`; in
    either case with at most `max_batch` queries, unless one call brought more.
    """

    def __init__(
        self,
        run: Run[T],
        *,
        max_batch: int,
        max_wait_s: float = 0.0,
        max_running: int = 1,
    ) -> None:
        self._run = run
        self.max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._max_running = max_running
        self._waiting: deque[_Call[T]] = deque()  # oldest first
        self._late: deque[_Call[T]] = deque()
        self._waiting_queries = 0
        self._window = float(max_running)  # batches that may be under way
        self.refused: RetrievalOverloaded | None = None  # the last batch, if it met that
        self._held_until = 0.0  # of the monotonic clock: nothing is begun
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
        for call in [*self._waiting, *self._late]:
            call.results.cancel()
        self._waiting.clear()
        self._late.clear()
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    @property
    def waiting(self) -> int:
        """Queries that no call has taken yet."""
        return self._waiting_queries

    async def search(
        self, queries: Sequence[str], top_k: int, deadline: float = math.inf
    ) -> list[list[T]]:
        """Per query at most `top_k` results, best first; raises what `run` raised.

        RetrievalOverloaded only where one may ask again after the deadline. A caller that stops
        waiting is not searched for, unless that has begun.
        """
        if not queries:
            return []
        results: asyncio.Future[list[list[T]]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call[T](queries, top_k, results, time.monotonic(), deadline))
        self._waiting_queries += len(queries)
        self._schedule()
        return await results

    def _schedule(self) -> None:
        if len(self._running) >= int(self._window):
            return
        held_s = self._held_until - time.monotonic()
        if self._waiting_queries >= self.max_batch and held_s <= 0.0:
            self._start()
        elif self._deadline is None:
            wait_s = max(self._max_wait_s if self._running else 0.0, held_s)
            self._deadline = asyncio.get_running_loop().call_later(wait_s, self._start)

    def _start(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if len(self._running) >= int(self._window):
            return
        if self._held_until > time.monotonic():
            self._schedule()
            return
        if not (calls := self._take()):
            return
        queries = [query for call in calls for query in call.queries]
        # A smaller top_k is a prefix of a larger one, so one call serves them all.
        top_k, deadline = (max(call.top_k for call in calls), max(call.deadline for call in calls))
        running = asyncio.ensure_future(self._run(queries, top_k, deadline))
        self._running.add(running)
        running.add_done_callback(partial(self._finish, calls))
        if self._waiting or self._late:
            self._schedule()

    def _take(self) -> list[_Call[T]]:
        calls: list[_Call[T]] = []
        size = 0
        while (side := self._next()) is not None:
            call = side[0] if side is self._waiting else side[-1]
            full = size + len(call.queries) > self.max_batch
            if calls and (full or call.alone or calls[-1].alone):
                break
            calls.append(self._drop(side, first=side is self._waiting))
            size += len(call.queries)
        return calls

    def _next(self) -> deque[_Call[T]] | None:
        """The queue whose turn it is, of calls in time the first, of late ones the last; what
        nobody waits for is dropped from their ends.
        """
        now = time.monotonic()
        while self._waiting and (self._waiting[0].results.done() or self._waiting[0].is_late(now)):
            if self._waiting[0].results.done():
                self._drop(self._waiting)
            else:
                self._late.append(self._waiting.popleft())
        for first in (True, False):
            while self._late and self._late[0 if first else -1].results.done():
                self._drop(self._late, first)
        return self._waiting or self._late or None

    def _drop(self, queue: deque[_Call[T]], first: bool = True) -> _Call[T]:
        call = queue.popleft() if first else queue.pop()
        self._waiting_queries -= len(call.queries)
        return call

    def _join(self, calls: Sequence[_Call[T]]) -> None:
        """Have calls wait before all others."""
        self._waiting.extendleft(reversed(calls))
        self._waiting_queries += sum(len(call.queries) for call in calls)

    def _finish(self, calls: list[_Call[T]], running: asyncio.Future[list[list[T]]]) -> None:
        self._running.discard(running)
        error = None if running.cancelled() else running.exception()
        if len(calls) > 1 and isinstance(error, RetrievalRefused):
            self._join([replace(call, alone=True) for call in calls])
            self._start()
            return
        again: list[_Call[T]] = []
        self.refused = error if isinstance(error, RetrievalOverloaded) else None
        if isinstance(error, RetrievalOverloaded):
            again = self._shrink(calls, error.retry_after_s)
        else:
            self._window = min(self._max_running, self._window + 1.0 / self._window)
            self._held_until = 0.0
        begin = 0
        for call in calls:
            end = begin + len(call.queries)
            if call not in again and not call.results.done():  # its caller may have gone
                _settle(call, running, begin, end)
            begin = end
        if self._waiting or self._late:
            self._start()

    def _shrink(self, calls: list[_Call[T]], after_s: float) -> list[_Call[T]]:
        """Begin fewer batches; those of the calls that have the time for it are to be asked again:
        when another batch ends, or after that time.
        """
        self._window = float(max(1, len(self._running)))
        now = time.monotonic()
        if not self._running:
            self._held_until = now + after_s
        again = [call for call in calls if now + after_s < call.deadline < math.inf]
        self._join(again)
        return again


def _settle(call: _Call[T], running: asyncio.Future[list[list[T]]], begin: int, end: int) -> None:
    if running.cancelled():
        call.results.cancel()
    elif (error := running.exception()) is not None:
        call.results.set_exception(error)
    else:
        call.results.set_result([found[: call.top_k] for found in running.result()[begin:end]])

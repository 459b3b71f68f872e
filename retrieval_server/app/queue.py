"""The searches that wait for the index: who is let in, and what is searched together.

One batch is under way at a time, sized by what queries have been measured to take (`pace`): it
takes the oldest queries, of a large search only a part. A search is let in if by that measure its
answer comes in time, and always where nothing else is there; else it is refused at once. Whoever
has gone, or can be answered in time no more, is not searched for.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, Self, TypeVar

from retrieval_server.app.pace import Fit, Pace, batch_size, late_s
from retrieval_server.protocol import RetrievalOverloaded

LONG_CHARS = 1024  # a query counts once more for each
T = TypeVar("T")
Run = Callable[[list[str], int], Awaitable[list[list[T]]]]


@dataclass(eq=False)
class _Search(Generic[T]):
    """One request's queries, searched for in order, perhaps in several batches."""

    queries: Sequence[str]
    top_k: int
    deadline: float  # of the monotonic clock
    results: asyncio.Future[list[list[T]]]
    load: int  # of the queries that no batch has taken yet
    taken: int = 0
    found: list[list[T]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Queries that no batch has taken yet."""
        return len(self.queries) - self.taken


class _Piece(NamedTuple, Generic[T]):
    """A search's part of a batch."""

    search: _Search[T]
    begin: int
    end: int


class SearchQueue(Generic[T]):
    """The queue before one index; use as `async with`, from one event loop.

    `run(queries, top_k)` returns one list per query, at most `top_k` long, best first; it is
    called with at most `max_batch` queries, never twice at a time. At most `max_waiting` wait.
    """

    def __init__(self, run: Run[T], *, max_batch: int, max_waiting: int, deadline_s: float) -> None:
        self._run = run
        self._max_batch, self._max_waiting, self._deadline_s = max_batch, max_waiting, deadline_s
        self._waiting: deque[_Search[T]] = deque()
        self._load = 0
        self.waiting = 0  # queries that no batch has taken yet
        self._running: asyncio.Future[list[list[T]]] | None = None
        self._ends_at = 0.0  # when the running batch is expected to end
        self._start_soon: asyncio.Handle | None = None
        self._fit, self._is_warm = Fit(), False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abandon what is waiting and what is running."""
        if self._start_soon is not None:
            self._start_soon.cancel()
        for search in self._waiting:
            search.results.cancel()
        self._waiting.clear()
        if (running := self._running) is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    @property
    def batch_queries(self) -> int:
        """How many queries a batch takes at present."""
        return batch_size(self._fit.pace, self._deadline_s, self._max_batch)

    @property
    def offered(self) -> int:
        """How many queries a request had best hold, while others wait."""
        return self.batch_queries if self._fit.pace is not None else self._max_batch

    @property
    def backlog_s(self) -> float:
        """Seconds until what is here now has been searched."""
        pace = self._fit.pace
        return self._running_s() + (pace.seconds(self._load, self.batch_queries) if pace else 0.0)

    def search(
        self, queries: Sequence[str], top_k: int, deadline: float
    ) -> asyncio.Future[list[list[T]]]:
        """Per query at most `top_k` results, best first, by then; or what `run` raised.

        Cancel it when nobody waits any more. Raises RetrievalOverloaded where too much is waiting.
        """
        results: asyncio.Future[list[list[T]]] = asyncio.get_running_loop().create_future()
        if not queries:
            results.set_result([])
            return results
        load = sum(map(_load, queries))
        self._admit(load, deadline)
        search = _Search(queries, top_k, deadline, results, load)
        results.add_done_callback(partial(self._settled, search))
        self._waiting.append(search)
        self._load += load
        self.waiting += len(queries)
        if self._running is None and self._start_soon is None:
            # Not at once: what this turn of the event loop brings goes together.
            self._start_soon = asyncio.get_running_loop().call_soon(self._start)
        return results

    def _admit(self, load: int, deadline: float) -> None:
        pace, batch = self._fit.pace, self.batch_queries
        if self._load and self._load + load > self._max_waiting:
            said = f"{self.waiting} queries are waiting, of at most {self._max_waiting}"
            raise RetrievalOverloaded(said, self.backlog_s)
        if pace is None or (self._running is None and not self._load):
            return
        left_s = deadline - time.monotonic()
        too_late_s = late_s(pace, self._running_s(), self._load + load, batch, left_s)
        if too_late_s > 0.0:
            said = f"{self.waiting} queries are waiting, {self.backlog_s:.2g} s"
            raise RetrievalOverloaded(f"{said}, and {left_s:.3g} s are left", too_late_s)

    def _running_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic()) if self._running is not None else 0.0

    def _start(self) -> None:
        self._start_soon = None
        if not (pieces := self._take()):
            return
        queries = [query for one, begin, end in pieces for query in one.queries[begin:end]]
        load, begun = sum(map(_load, queries)), time.monotonic()
        self._ends_at = begun + (self._fit.pace.seconds(load, load) if self._fit.pace else 0.0)
        # A smaller top_k is a prefix of a larger one, so one call serves them all.
        top_k = max(piece.search.top_k for piece in pieces)
        self._running = asyncio.ensure_future(self._run(queries, top_k))
        self._running.add_done_callback(partial(self._finish, pieces, load, begun))

    def _take(self) -> list[_Piece[T]]:
        pieces: list[_Piece[T]] = []
        now, room = time.monotonic(), self.batch_queries
        while self._waiting and room > 0:
            search = self._waiting[0]
            if not search.results.done() and not self._is_hopeless(search, now):
                begin, room = search.taken, self._take_from(search, room)
                if search.taken == begin:
                    break  # its next query is too long for what is left of this batch
                pieces.append(_Piece(search, begin, search.taken))
                if search.left:
                    break
            self._waiting.popleft()
        return pieces

    def _take_from(self, search: _Search[T], room: int) -> int:
        """Take as many of its queries as there is room for; returns the room that is left."""
        is_first = room == self.batch_queries
        while search.left:
            load = _load(search.queries[search.taken])
            if load > room and not is_first:
                break
            is_first = False
            search.taken += 1
            search.load -= load
            self._load -= load
            self.waiting -= 1
            room -= load
        return room

    def _is_hopeless(self, search: _Search[T], now: float) -> bool:
        """Refuse a search that would be late; the last one is tried: the index may be faster."""
        pace: Pace | None = self._fit.pace
        if pace is None or (len(self._waiting) == 1 and not search.taken):
            return False
        batch = self.batch_queries
        # Before its first batch by that alone: of the rest only an estimate is known.
        load = search.load if search.taken else min(search.load, batch)
        if now + pace.seconds(load, batch) <= search.deadline:
            return False
        search.results.set_exception(
            RetrievalOverloaded(f"too late for {search.left} queries", self.backlog_s)
        )
        return True

    def _finish(
        self,
        pieces: list[_Piece[T]],
        load: int,
        begun: float,
        running: asyncio.Future[list[list[T]]],
    ) -> None:
        self._running = None
        if running.cancelled():
            for piece in pieces:
                piece.search.results.cancel()
            return
        now, error = time.monotonic(), running.exception()
        if error is None:
            if self._is_warm:  # the first one loads what later ones find loaded
                self._fit.add(load, now - begun)
            self._is_warm = True
            _hand_out(pieces, running.result())
        for search in {id(piece.search): piece.search for piece in pieces}.values():
            if error is not None and not search.results.done():
                search.results.set_exception(error)
        self._start()

    def _settled(self, search: _Search[T], results: asyncio.Future[list[list[T]]]) -> None:
        """Nobody waits for the rest of it, if any."""
        self._load -= search.load
        self.waiting -= search.left
        search.load, search.taken = 0, len(search.queries)
        if not results.cancelled():
            results.exception()  # perhaps its caller has just gone


def _load(query: str) -> int:
    return 1 + len(query) // LONG_CHARS


def _hand_out(pieces: list[_Piece[T]], rows: list[list[T]]) -> None:
    at = 0
    for search, begin, end in pieces:
        part = rows[at : at + end - begin]
        at += end - begin
        search.found.extend(row[: search.top_k] for row in part)
        if len(search.found) == len(search.queries) and not search.results.done():
            search.results.set_result(search.found)

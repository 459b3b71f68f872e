"""Client of retrieval servers: pooled, with a deadline, retrying named failures only.

A search takes at most `timeout_s`, retries and other servers included; only the gauges tell of a
server that was started again within that time. An infrastructure failure is always an exception,
never a result: its text cannot reach a trajectory.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

import msgspec

from retrieval_server.batching import Batcher
from retrieval_server.cache import QueryCache
from retrieval_server.protocol import (
    MAX_QUERY_CHARS,
    BadQuery,
    Passage,
    RetrievalDenied,
    RetrievalError,
    RetrievalOverloaded,
    RetrievalTimeout,
    RetrieveRequest,
)
from retrieval_server.servers import FAILED, LOOK_EVERY_S, NOT_MET, Server, Servers

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_POST_QUERIES = 64
_WINDOW = 1024  # calls that the percentiles look back on
_GATHER_S = 0.002
_GRACE_S = 0.25  # at most, of the deadline, for a POST's own, better named, end: a tenth of it


class Backoff:
    """Pauses doubled from `first_s` to `longest_s`, jittered so that callers return out of step."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._random = random.Random()

    def pause_s(self, attempt: int) -> float:
        """Return the seconds before the next attempt; the first one is attempt 0."""
        longest: float = min(self._first_s * 2**attempt, self._longest_s)
        return longest * self._random.uniform(0.5, 1.0)


class Latencies:
    """Seconds that recent successful calls took, retries included."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def add(self, seconds: float) -> None:
        """Record one call."""
        self._seconds.append(seconds)

    def gauges(self, name: str) -> dict[str, float]:
        """Return nearest-rank percentiles, `NAME_p50_s` and `NAME_p99_s`; 0 without a call."""
        ordered = sorted(self._seconds) or [0.0]
        return {
            f"{name}_{part}_s": ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]
            for part, fraction in (("p50", 0.50), ("p99", 0.99))
        }


LEAST_S = 0.02  # of an attempt: with less it would be late, and hide what was met before
_encoder = msgspec.json.Encoder()


class RetrievalClient:
    """Asks one server, or those of a list; use as `async with`, from one event loop.

    Calls made while a POST is under way gather for `_GATHER_S` and share the next one; at most
    `max_connections` POSTs are under way. `urls`: the servers' base URLs, or those of their
    `/retrieve`; `retrieval_server.servers` says which is asked.
    `timeout_s`: deadline of a search, waiting for a connection and all retries included; while
    retries are left, an attempt may use half of the time that remains, so that one lost reply does
    not use it up. `retries` bounds attempts that servers met beyond one for each server; while
    nobody listens, or the server says that too much is waiting and when to ask again, it is tried
    until the deadline. `token`: shown with every request, unless it is empty. `cache_queries`: the
    results of so many are remembered, until the server's index is another one; the same query
    asked for twice at once is sent once in any case. `index_version`: that which several servers
    must serve, where it is known before the first reply.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        timeout_s: float = 30.0,
        retries: int = 3,
        max_connections: int = 64,
        token: str = "",
        cache_queries: int = 0,
        index_version: str = "",
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._cache = QueryCache(cache_queries)
        self._servers = Servers(
            (urls,) if isinstance(urls, str) else urls,
            token,
            self._cache.of_version,
            index_version,
            look_every_s,
        )
        self._timeout_s = timeout_s
        self._grace_s = min(_GRACE_S, timeout_s / 10)
        self._retries = retries
        self._batcher = Batcher(
            self._post, max_batch=_POST_QUERIES, max_wait_s=_GATHER_S, max_running=max_connections
        )
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._requests = self._errors = self._retried = self._calls = self._failovers = 0
        self._in_flight = 0
        self._latencies = Latencies()

    async def __aenter__(self) -> Self:
        await self._servers.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cache.close()
        await self._batcher.close()
        await self._servers.close()

    @property
    def index_version(self) -> str:
        """The version of the index that is searched; "" before the first reply, or where the
        servers tell none.
        """
        return self._servers.version or ""

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Per query at most `top_k` passages, best first; no match is an empty list.

        Raises RetrievalTimeout (also where no connection was free in time), RetrievalUnavailable or
        BadReply, each after its retries, and RetrievalRefused where no retry would help.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k!r}")
        self._requests += 1
        self._in_flight += 1
        begun = time.monotonic()
        try:
            _check(queries)
            async with asyncio.timeout(self._timeout_s):
                passages = await self._cache.get(
                    queries, top_k, lambda new: self._search(new, top_k)
                )
        except TimeoutError as error:  # it shares the query of another caller, who has more time
            self._errors += 1
            raise self._late() from error
        except RetrievalError:
            self._errors += 1
            raise
        finally:
            self._in_flight -= 1
        self._latencies.add(time.monotonic() - begun)
        return passages

    def gauges(self) -> dict[str, float]:
        """Return counts since the start, and latencies of recent successful calls."""
        return {
            "retrieval/requests": float(self._requests),
            "retrieval/in_flight": float(self._in_flight),  # that wait for their answer now
            "retrieval/errors": float(self._errors),  # calls that failed after their retries
            "retrieval/retried": float(self._retried),  # POSTs beyond the first
            "retrieval/calls": float(self._calls),  # POSTs, without those again
            "retrieval/remembered": float(self._cache.remembered),  # queries, from the cache
            "retrieval/shared": float(self._cache.shared),  # queries that others were asking
            "retrieval/servers_up": float(self._servers.up),
            "retrieval/failovers": float(self._failovers),  # POSTs again, at another server
            **self._latencies.gauges("retrieval/latency"),
        }

    async def _search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Ask in a batch; whatever happens to the callers, nobody is asked beyond the deadline."""
        try:
            async with asyncio.timeout(self._timeout_s - self._grace_s / 2):
                deadline = time.monotonic() + self._timeout_s - self._grace_s
                return await self._batcher.search(queries, top_k, deadline)
        except TimeoutError as error:
            raise self._late() from error

    def _late(self) -> RetrievalTimeout:
        waiting = f"no answer within {self._timeout_s:g} s, {self._batcher.waiting} queries are"
        if refused := self._batcher.refused:  # more connections would ask for more
            return RetrievalTimeout(
                f"{waiting} waiting, as the last were refused ({refused}): give more servers "
                "(retrieval.url), or fewer searches at once; see retrieval.request_deadline_s"
            )
        return RetrievalTimeout(
            f"{waiting} waiting for a connection: see retrieval.max_connections"
        )

    async def _post(self, queries: list[str], top_k: int, deadline: float) -> list[list[Passage]]:
        body = _encoder.encode(RetrieveRequest(queries, top_k, return_scores=True))
        self._calls += 1
        attempts = _Attempts(self._servers, self._backoff, deadline, self._retries)
        server, seconds = attempts.first()
        while True:
            try:
                return await self._exchange(server, body, len(queries), seconds)
            except FAILED as error:
                last = server
                self._retried += 1
                try:
                    server, seconds = await attempts.after(server, error)
                except RetrievalOverloaded:  # the batcher asks again, perhaps in other batches
                    self._calls -= 1
                    raise
                except RetrievalError:
                    self._retried -= 1
                    raise
            self._failovers += server is not last

    async def _exchange(
        self, server: Server, body: bytes, expected: int, seconds: float
    ) -> list[list[Passage]]:
        try:
            return await self._servers.post(server, body, expected, seconds)
        finally:
            self._batcher.max_batch = self._servers.batch_queries(_POST_QUERIES)


class _Attempts:
    """The attempts of one batch: who is asked next, and for how long. Both ways to ask on raise
    its error where nobody may be asked any more, RetrievalOverloaded where nobody may just now.
    """

    def __init__(self, servers: Servers, backoff: Backoff, deadline: float, retries: int) -> None:
        self._servers, self._backoff = servers, backoff
        self._deadline = deadline
        self._last = deadline - min(LEAST_S, (deadline - time.monotonic()) / 2)
        self._left, self._pauses = retries + len(servers.all) - 1, 0
        self._met: dict[Server, RetrievalError] = {}
        self._tried: set[Server] = set()  # since the last pause

    def first(self) -> tuple[Server, float]:
        """The server to ask, and the seconds it may take."""
        if (server := self._servers.choose(self._tried)) is None:
            raise self._servers.nobody(self._met)
        remaining = self._deadline - time.monotonic()
        return server, remaining / 2 if self._left else remaining

    async def after(self, server: Server, error: RetrievalError) -> tuple[Server, float]:
        """`first`, once this has failed: at another server at once, else after a pause."""
        self._met.pop(server, None)
        self._met[server] = error  # the last of them
        self._tried.add(server)
        met, pause = not isinstance(error, NOT_MET), 0.0
        others = self._servers.able(self._tried)
        if isinstance(error, RetrievalOverloaded) and not others:
            pause = self._backoff.pause_s(0) + self._servers.busy_s()
            if time.monotonic() + pause < self._last:
                raise RetrievalOverloaded(str(error), pause)
            raise self._error(error)
        if not others:
            pause = self._backoff.pause_s(self._pauses) + self._servers.wait_s()
            self._pauses += 1
            self._tried.clear()
        final = (met and not self._left) or (isinstance(error, RetrievalDenied) and not others)
        if final or time.monotonic() + pause >= self._last:
            raise self._error(error)
        if pause:
            await asyncio.sleep(pause)
        if time.monotonic() >= self._last:  # it was a long sleep
            raise self._error(error)
        self._left -= met
        return self.first()

    def _error(self, error: RetrievalError) -> RetrievalError:
        return error if self._servers.alone else self._servers.nobody(self._met)


def _check(queries: Sequence[str]) -> None:
    longest = max(map(len, queries), default=0)
    if longest > MAX_QUERY_CHARS:
        raise BadQuery(f"a query of {longest} characters: at most {MAX_QUERY_CHARS} are allowed")
    for query in queries:
        try:
            query.encode()
        except UnicodeEncodeError as error:
            raise BadQuery(f"a query is no text ({error})") from error

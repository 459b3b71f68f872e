"""Client of retrieval servers: pooled, with a deadline, retrying named failures only.

A search takes at most `timeout_s`, retries included; only the gauges tell of a server that was
started again within that time. An infrastructure failure is always an exception, never a result:
its text cannot reach a trajectory. Replies of Search-R1's servers may lack ids, or hold a passage
that was not found.
"""

import asyncio
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

import httpx
import msgspec
from blake3 import blake3

from retrieval_server.batching import Batcher
from retrieval_server.cache import QueryCache
from retrieval_server.protocol import (
    INDEX_VERSION,
    MAX_QUERY_CHARS,
    RETRIED,
    BadQuery,
    BadReply,
    Passage,
    RetrievalDenied,
    RetrievalError,
    RetrievalOverloaded,
    RetrievalRefused,
    RetrievalTimeout,
    RetrievalUnavailable,
    RetrievalUnreachable,
    RetrieveRequest,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_POST_QUERIES = 64
_WINDOW = 1024  # calls that the percentiles look back on
_GATHER_S = 0.002
_GRACE_S = 0.25  # for a POST's own, better named, end
_SHOWN_BYTES = 200  # of a reply, in messages
_NO_HIT = -3e38  # a score at or below this is of a passage that was not found
_OF_THE_REQUEST = (400, 408, 413, 414, 422)  # another one may be answered
# httpx makes one for each connection else, also for plain HTTP, in half a millisecond.
_UNUSED_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


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


class _Document(msgspec.Struct, frozen=True, gc=False):
    """Any server's document."""

    contents: str
    id: str | int | None = None


class _Hit(msgspec.Struct, frozen=True, gc=False):
    document: _Document
    score: float


class _Reply(msgspec.Struct, frozen=True):
    result: list[list[_Hit]]


LEAST_S = 0.02  # of an attempt: with less it would be late, and hide what was met before
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Reply)


class RetrievalClient:
    """Asks one server; use as `async with`, from one event loop.

    Calls made while a POST is under way gather for `_GATHER_S` and share the next one; at most
    `max_connections` POSTs are under way. `url`: the server's base URL, or that of its `/retrieve`.
    `timeout_s`: deadline of a search, waiting for a connection and all retries included; while
    retries are left, an attempt may use half of the time that remains, so that one lost reply does
    not use it up. `retries` bounds attempts that a server met; while nobody listens, or the server
    says that too much is waiting and when to ask again, it is tried until the deadline.
    `token`: shown with every request, unless it is empty. `cache_queries`: the results of so many
    are remembered, until the server's index is another one; the same query asked for twice at once
    is sent once in any case.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 30.0,
        retries: int = 3,
        max_connections: int = 64,
        token: str = "",
        cache_queries: int = 0,
    ) -> None:
        self._cache = QueryCache(cache_queries)
        self._poster = _Poster(url, token, self._cache.of_version)
        self._timeout_s = timeout_s
        self._retries = retries
        self._batcher = Batcher(
            self._post, max_batch=_POST_QUERIES, max_wait_s=_GATHER_S, max_running=max_connections
        )
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._requests = self._errors = self._retried = self._calls = 0
        self._latencies = Latencies()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cache.close()
        await self._batcher.close()
        await self._poster.close()

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Per query at most `top_k` passages, best first; no match is an empty list.

        Raises RetrievalTimeout (also where no connection was free in time), RetrievalUnavailable or
        BadReply, each after its retries, and RetrievalRefused where no retry would help.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k!r}")
        self._requests += 1
        begun = time.monotonic()
        try:
            _check(queries)
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                passages = await self._cache.get(
                    queries, top_k, lambda new: self._batcher.search(new, top_k)
                )
        except TimeoutError as error:
            self._errors += 1
            raise RetrievalTimeout(
                f"no answer within {self._timeout_s:g} s, {self._batcher.waiting} queries are "
                "waiting for a connection: see retrieval.max_connections"
            ) from error
        except RetrievalError:
            self._errors += 1
            raise
        self._latencies.add(time.monotonic() - begun)
        return passages

    def gauges(self) -> dict[str, float]:
        """Return counts since the start, and latencies of recent successful calls."""
        return {
            "retrieval/requests": float(self._requests),
            "retrieval/errors": float(self._errors),  # calls that failed after their retries
            "retrieval/retried": float(self._retried),  # POSTs beyond the first
            "retrieval/calls": float(self._calls),  # POSTs, retries not counted
            "retrieval/remembered": float(self._cache.remembered),  # queries, from the cache
            "retrieval/shared": float(self._cache.shared),  # queries that others were asking
            **self._latencies.gauges("retrieval/latency"),
        }

    async def _post(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        body = _encoder.encode(RetrieveRequest(queries, top_k, return_scores=True))
        self._calls += 1
        deadline = time.monotonic() + self._timeout_s
        last = deadline - min(LEAST_S, self._timeout_s / 2)
        left, attempt = self._retries, 0
        while True:
            remaining = deadline - time.monotonic()
            pause = self._backoff.pause_s(attempt)
            try:
                return await self._poster.post(
                    body, len(queries), remaining / 2 if left else remaining
                )
            except RETRIED as error:
                met = not isinstance(error, RetrievalUnreachable | RetrievalOverloaded)
                if isinstance(error, RetrievalOverloaded):
                    pause += error.retry_after_s
                if (met and not left) or time.monotonic() + pause >= last:
                    raise
                await asyncio.sleep(pause)
                if time.monotonic() >= last:  # it was a long sleep
                    raise
            left, attempt = left - met, attempt + 1
            self._retried += 1


class _Poster:
    """POSTs over kept connections, each reused last in, first out.

    One httpx transport a connection: a shared httpx pool looks at all its connections for every
    request, which at 64 of them costs far more than the request. The caller bounds how many are
    used at once.
    """

    def __init__(self, url: str, token: str, of_version: Callable[[str], None]) -> None:
        """`of_version` is told the version of the index that a reply is of, "" where none is."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"retrieval url must begin with http:// or https://, got {url!r}")
        self._of_version = of_version
        self._url = httpx.URL(url.rstrip("/").removesuffix("/retrieve") + "/retrieve")
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._tls = httpx.create_ssl_context() if self._url.scheme == "https" else _UNUSED_TLS
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def post(self, body: bytes, expected: int, seconds: float) -> list[list[Passage]]:
        """Send one request body; returns `expected` lists, or raises the RetrievalError it met."""
        transport = self._idle.pop() if self._idle else self._connection()
        good = False
        try:
            response, content = await self._exchange(transport, body, seconds)
            rows = parse_reply(response, content, expected, f"{self._url}")
            good = True
        except RetrievalOverloaded:  # in order; under load, connecting again would add to it
            good = True
            raise
        finally:
            if good:
                self._idle.append(transport)
            else:  # what may still come of a reply cut off, or be left of a bad one, answers nobody
                await transport.aclose()
        self._of_version(response.headers.get(INDEX_VERSION, ""))
        return rows

    async def _exchange(
        self, transport: httpx.AsyncHTTPTransport, body: bytes, seconds: float
    ) -> tuple[httpx.Response, bytes]:
        request = httpx.Request("POST", self._url, content=body, headers=self._headers)
        try:
            async with asyncio.timeout(seconds):
                response = await transport.handle_async_request(request)
                return response, await response.aread()
        except TimeoutError as error:
            raise RetrievalTimeout(f"{self._url} did not answer within {seconds:.3g} s") from error
        except httpx.ConnectError as error:
            raise RetrievalUnreachable(f"{self._url}: {type(error).__name__}: {error}") from error
        except httpx.RequestError as error:
            raise RetrievalUnavailable(f"{self._url}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the kept connections."""
        while self._idle:
            await self._idle.pop().aclose()

    def _connection(self) -> httpx.AsyncHTTPTransport:
        # A proxy of the environment must not come between us and a loopback server.
        limits = httpx.Limits(max_connections=1, keepalive_expiry=30.0)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)


def parse_reply(
    response: httpx.Response, content: bytes, expected: int, url: str
) -> list[list[Passage]]:
    """Return the `expected` lists of passages in a reply.

    Over a Lucene index, Search-R1's servers send no ids: a passage is then named after its contents
    (`blake3-` and 16 hexadecimal digits). Where FAISS finds too little they send some other passage
    with the lowest float32 as its score: it is left out. Raises RetrievalUnavailable,
    RetrievalRefused or BadReply.
    """
    said = repr(content[:_SHOWN_BYTES].decode(errors="replace"))
    if response.status_code != 200:
        raise _error(response, f"{url} answered {response.status_code}", said)
    try:
        reply = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReply(f"{url}: {error}; body {said}") from error
    if len(reply.result) != expected:
        raise BadReply(f"{url}: {len(reply.result)} results for {expected} queries")
    return [[_passage(hit) for hit in row if hit.score > _NO_HIT] for row in reply.result]


def _error(
    response: httpx.Response, what: str, said: str
) -> RetrievalUnavailable | RetrievalRefused:
    status, after = response.status_code, response.headers.get("retry-after", "")
    if status == 503 and after.isdecimal():
        return RetrievalOverloaded(f"{what}: {said}", float(after))
    if status == 429 or status >= 500:
        return RetrievalUnavailable(f"{what}: {said}")
    if status in _OF_THE_REQUEST:
        return RetrievalRefused(f"{what}: {said}")
    remedy = "see retrieval.url and retrieval.token_file"
    if status == 401:
        remedy = "retrieval.token_file does not hold its token: give a copy of the server's"
    return RetrievalDenied(f"{what}: {remedy}: {said}")


def _passage(hit: _Hit) -> Passage:
    document = hit.document
    name = document.id
    if name is None:
        name = f"blake3-{blake3(document.contents.encode()).hexdigest(length=8)}"
    return Passage(str(name), document.contents, hit.score)


def _check(queries: Sequence[str]) -> None:
    longest = max(map(len, queries), default=0)
    if longest > MAX_QUERY_CHARS:
        raise BadQuery(f"a query of {longest} characters: at most {MAX_QUERY_CHARS} are allowed")
    for query in queries:
        try:
            query.encode()
        except UnicodeEncodeError as error:
            raise BadQuery(f"a query is no text ({error})") from error

"""The servers of one list: who is asked next, who rests, and which index they must serve.

- The one with the least work: its requests of ours under way, the next one included, times the
  time that its answers have lately taken. The host's own has to be twice as busy for another one to
  be asked. Between equals a hash decides whose turn it is.
- A server that fails rests, twice as long after each failure in a row, until it is seen to listen
  again; then it is asked by one request at a time until one succeeds. One that is overloaded is
  left alone for as long as it says, one that drains while others can serve.
- Where none can serve, the one that may be asked soonest, and of those the one that failed first.
- A server that answers from another index than the run's is taken out. Where all have come to
  serve the same other one, that is the run's from then on; whoever is gone is not counted.
"""

import asyncio
import itertools
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3

from configs.runtime.hosts import is_own_host
from retrieval_server.poster import CONNECT_S, Poster
from retrieval_server.protocol import (
    RETRIED,
    Info,
    OtherIndex,
    Passage,
    Readiness,
    RetrievalDenied,
    RetrievalError,
    RetrievalOverloaded,
    RetrievalUnreachable,
)

LOOK_EVERY_S = 2.0  # between questions whether a server is ready, at most
FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0
GONE_S = 10.0  # without anybody who listens: what a start again of a server takes, and more
FAILED = (*RETRIED, RetrievalDenied)  # by a server; another one may do better
NOT_MET = (RetrievalUnreachable, RetrievalOverloaded, OtherIndex)  # of FAILED: by no query
_LOOK_S = 5.0  # for an answer whether it is ready
_RESOLVER_S = 2.0  # whoever's name is not found by then is not near
_DOUBLED = 16  # times at most
_EQUAL_S = 0.05  # answers within it are as good as each other
_NEAR = 2.0  # times as busy may the host's own be
_NEWEST = 0.3  # of a server's latency is its last answer's
_FORGOTTEN_S = 10.0  # without an answer: half of the latency, so that who was slow is asked again
_INFO, _READY = msgspec.json.Decoder(Info), msgspec.json.Decoder(Readiness)

logger = logging.getLogger("retrieval_client")
_clients = itertools.count()
T = TypeVar("T")


@dataclass(eq=False)
class Server:
    """One server, as its client knows it. Times are of the monotonic clock."""

    poster: Poster
    turn: bytes = b""  # its place among equals
    near: bool = False
    under_way: int = 0
    failures: int = 0  # in a row
    failed_at: float = 0.0
    rests_until: float = 0.0
    busy_until: float = 0.0
    listens: bool = True  # it has been seen to since it failed
    silent_since: float | None = None  # nobody has listened there
    drains: bool = False
    version: str | None = None  # of its index, by its last reply
    is_other: bool = False  # its index is not the run's
    latency_s: float | None = None  # of its last answers
    answered_at: float = 0.0
    cause: RetrievalError | None = None  # of its last failure

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"{self.poster.url}"

    def is_well(self, now: float) -> bool:
        """True unless it rests, or serves another index."""
        rests = self.failures > 0 and (now < self.rests_until or not self.listens)
        return not rests and not self.is_other

    def is_gone(self, now: float) -> bool:
        """True where nobody has listened for a while: which index it had says nothing any more."""
        return self.silent_since is not None and now - self.silent_since >= GONE_S

    def can_serve(self, now: float) -> bool:
        """True where it may be asked at once."""
        on_trial = self.failures > 0 and self.under_way > 0
        return self.is_well(now) and now >= self.busy_until and not on_trial

    def answered(self, begun: float, now: float) -> None:
        """Note what its answer took."""
        taken_s = now - begun
        before_s = taken_s if self.latency_s is None else self.latency_s
        self.latency_s, self.answered_at = before_s + _NEWEST * (taken_s - before_s), now

    def work_s(self, now: float, otherwise_s: float) -> float:
        """Seconds until one more request is answered; `otherwise_s` for each where none was."""
        each_s = otherwise_s
        if self.latency_s is not None:
            since_s = max(0.0, now - self.answered_at)
            each_s = self.latency_s * 0.5 ** (since_s / _FORGOTTEN_S)
        return (self.under_way + 1) * max(each_s, _EQUAL_S) * (1.0 if self.near else _NEAR)

    def served(self, begun: float) -> None:
        """Note the success of what began then."""
        if begun >= self.failed_at:
            self.failures = 0
            self.heard()

    def heard(self) -> None:
        """Note that it listens."""
        self.listens, self.silent_since = True, None

    def failed(self, error: RetrievalError, begun: float, now: float) -> None:
        """Note how what began then has failed; what was under way together counts once."""
        self.cause = error
        if isinstance(error, RetrievalOverloaded):
            self.busy_until = max(self.busy_until, now + error.retry_after_s)
        elif not isinstance(error, OtherIndex) and begun >= self.failed_at:
            longest_s = min(FIRST_REST_S * 2 ** min(self.failures, _DOUBLED), LONGEST_REST_S)
            self.rests_until = now + longest_s * random.uniform(0.5, 1.0)
            self.failures, self.failed_at, self.listens = self.failures + 1, now, False
            if isinstance(error, RetrievalUnreachable) and self.silent_since is None:
                self.silent_since = now


class Servers:
    """The servers of one client; `open` before they are asked, `close` afterwards."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        of_version: Callable[[str], None],
        index_version: str = "",
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`of_version` is told the version of the index that a reply is of, "" where none is;
        `index_version`: the run's, where it is known before the first reply.
        """
        if not urls:
            raise ValueError("name at least one retrieval server")
        self.alone = len(urls) == 1
        connect_s = None if self.alone else CONNECT_S
        asker = f"{socket.gethostname()}-{os.getpid()}-{next(_clients)}"
        self.all = [
            Server(Poster(url, token, connect_s), blake3(f"{asker}\0{url}".encode()).digest())
            for url in urls
        ]
        self.version = index_version or None
        self._of_version, self._look_every_s = of_version, look_every_s
        self._watching: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Where there is a choice, find out who is near, and watch all."""
        if not self.alone:
            await asyncio.gather(*map(_find_near, self.all))
            self._watching = [asyncio.create_task(self._watch(each)) for each in self.all]

    async def close(self) -> None:
        """Close all connections."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for server in self.all:
            await server.poster.close()

    @property
    def up(self) -> int:
        """How many are well and do not drain."""
        now = time.monotonic()
        return sum(each.is_well(now) and not each.drains for each in self.all)

    def batch_queries(self, most: int) -> int:
        """How many queries a request had best hold for any server in use, of at most so many."""
        now = time.monotonic()
        used = [each for each in self.all if each.is_well(now) and not each.drains]
        return min([most, *(each.poster.batch_queries or most for each in used)])

    def able(self, tried: Collection[Server] = ()) -> list[Server]:
        """Those that can serve at once, draining ones where no others can; none of the `tried`."""
        now = time.monotonic()
        able = [each for each in self.all if each not in tried and each.can_serve(now)]
        return [each for each in able if not each.drains] or able

    def choose(self, tried: Collection[Server] = ()) -> Server | None:
        """The server to ask now; None where all serve another index than the run's."""
        now = time.monotonic()
        if able := self.able(tried):
            known = [each.latency_s for each in able if each.latency_s is not None]
            usual_s = sum(known) / len(known) if known else 0.0
            work = lambda each: (each.work_s(now, usual_s), not each.near, each.turn)  # noqa: E731
            return min(able, key=work)
        left = [each for each in self.all if not each.is_other]
        order = lambda each: (max(each.busy_until, now), each.failed_at)  # noqa: E731
        return min(left, key=order, default=None)

    def wait_s(self) -> float:
        """Seconds until one may be asked, where none can serve."""
        now = time.monotonic()
        waits = [each.busy_until - now for each in self.all if not each.is_other]
        return max(0.0, min(waits, default=0.0))

    def busy_s(self) -> float:
        """Seconds until one that is well may be asked, where all such are overloaded."""
        now = time.monotonic()
        waits = [each.busy_until - now for each in self.all if each.is_well(now)]
        return max(0.0, min(waits, default=0.0))

    async def post(
        self, server: Server, body: bytes, expected: int, seconds: float
    ) -> list[list[Passage]]:
        """Ask one of them; raises the RetrievalError it met, one of FAILED to its discredit."""
        begun = time.monotonic()
        server.under_way += 1
        try:
            rows, version = await server.poster.post(body, expected, seconds)
            self._accept(server, version)
        except FAILED as error:
            self._failed(server, error, begun)
            raise
        finally:
            server.under_way -= 1
        server.served(begun)
        server.answered(begun, time.monotonic())
        return rows

    def nobody(self, met: Mapping[Server, RetrievalError]) -> RetrievalError:
        """The error of a search that has met these and has nobody left to ask: of the kind that a
        query may have caused, where there is one, else of the last; with each server's cause.
        """
        now = time.monotonic()
        causes = [
            f"{met.get(each) or each.cause}"
            for each in self.all
            if each in met or not each.is_well(now)
        ]
        said = f"no answer from {len(causes)} of {len(self.all)} retrieval servers: "
        met_by_query = [error for error in met.values() if not isinstance(error, NOT_MET)]
        last = (met_by_query or [*met.values()] or [OtherIndex()])[-1]
        if isinstance(last, RetrievalOverloaded):
            return RetrievalOverloaded(said + "; ".join(causes), last.retry_after_s)
        return type(last)(said + "; ".join(causes))

    def _accept(self, server: Server, version: str) -> None:
        """Take a reply's version in. Raises OtherIndex where it is not the run's."""
        server.version = version
        if version != self.version and not self._adopted(version):
            raise OtherIndex(
                f"{server.url} serves index {version!r}, this run searches {self.version!r}: "
                "start it with the run's index, or leave it out of retrieval.url"
            )
        server.is_other = False
        self._of_version(version)

    def _adopted(self, version: str) -> bool:
        """Make it the run's where none is yet, or all that are not gone serve it."""
        now = time.monotonic()
        gone = [each for each in self.all if each.is_gone(now) and each.version != version]
        others = [each for each in self.all if each not in gone and each.version != version]
        if self.version is not None and others:
            return False
        if self.version is not None and not self.alone:
            but = f" (but for {', '.join(each.url for each in gone)}: gone)" if gone else ""
            logger.warning(
                "all servers%s serve index %r now, no longer %r", but, version, self.version
            )
            for each in gone:  # it is told apart by its next reply
                each.version = None
        self.version = version
        for each in self.all:
            each.is_other = each.version not in (None, version)
        return True

    def _failed(self, server: Server, error: RetrievalError, begun: float) -> None:
        was_well = server.is_well(time.monotonic())
        server.failed(error, begun, time.monotonic())
        server.is_other = server.is_other or isinstance(error, OtherIndex)
        if not isinstance(error, RetrievalOverloaded):
            server.poster.batch_queries = 0  # of who failed; of who comes back its replies tell
        if was_well and not server.is_well(time.monotonic()) and not self.alone:
            what = "is taken out" if server.is_other else "rests"
            logger.warning("retrieval server %s %s: %s", server.url, what, error)

    async def _watch(self, server: Server) -> None:
        """See again and again whether a server listens, drains, or serves the run's index again."""
        while True:
            await asyncio.sleep(self._look_every_s * random.uniform(0.5, 1.0))
            begun = time.monotonic()
            if begun < server.rests_until:
                continue
            try:
                if server.is_other:
                    self._see_index(server, await server.poster.look("/info", _LOOK_S))
                else:
                    self._see_readiness(server, await server.poster.look("/ready", _LOOK_S))
            except RetrievalUnreachable as error:
                self._failed(server, error, begun)
            except RetrievalError:
                pass  # slow, or no HTTP: searches tell

    def _see_readiness(self, server: Server, told: tuple[int, bytes]) -> None:
        """Search-R1's servers answer 404: they listen."""
        drains = told[0] == 503 and _decoded(_READY, told[1]) == Readiness("draining")
        if drains and not server.drains:
            logger.info("retrieval server %s drains", server.url)
        server.drains = drains
        server.heard()

    def _see_index(self, server: Server, told: tuple[int, bytes]) -> None:
        info = _decoded(_INFO, told[1])
        server.heard()
        if info is None:
            return
        server.version = info.index_version
        if server.version == self.version or self._adopted(server.version):
            server.is_other = False
            self._of_version(server.version)
            logger.info("retrieval server %s serves index %r again", server.url, self.version)


async def _find_near(server: Server) -> None:
    host = urlsplit(server.url).hostname or ""
    try:
        async with asyncio.timeout(_RESOLVER_S):
            server.near = await asyncio.to_thread(is_own_host, host)
    except TimeoutError:
        logger.warning("%s: not resolved within %g s, not taken for near", host, _RESOLVER_S)


def _decoded(decoder: "msgspec.json.Decoder[T]", content: bytes) -> T | None:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None

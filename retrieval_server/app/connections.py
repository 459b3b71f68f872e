"""The server's connections: how many there may be, and how long a request may take to come in.

Who sends nothing, or a request byte by byte, holds up nobody: its connection is closed in time, and
before that whenever another needs the place. Of the connections that wait for a request, or for the
rest of one, those of the peer that holds most of them go first, the oldest before the others.
"""

import asyncio
import logging
import resource
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S = 10.0  # for the head of a request, from the connection or the head's first byte on
MOST = 8192
LEAST = 16
_SPARE = 64  # descriptors for files, and for connections that are about to be closed
_PATIENCE_S = 60.0  # between words about closed connections

logger = logging.getLogger("retrieval_server")


def most_connections() -> int:
    """How many this process may have, its limit of descriptors raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST + 2 * _SPARE if hard == resource.RLIM_INFINITY else min(hard, MOST + 2 * _SPARE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return MOST
    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return max(LEAST, min(MOST, soft - used - _SPARE))


class Connections:
    """The open connections, and which of them wait for a request or for the rest of one."""

    def __init__(self, most: int, headers_s: float = HEADERS_S, body_s: float = 30.0) -> None:
        self.most, self.headers_s, self.body_s = most, headers_s, body_s
        self._open: set[Any] = set()
        self._idle: defaultdict[str, dict[Any, None]] = defaultdict(dict)  # by peer, oldest first
        self._told_at = -_PATIENCE_S

    def opened(self, one: Any, peer: str) -> None:
        """Take a new connection in; where there are too many, one that waits is closed."""
        self._open.add(one)
        self.waits(one, peer)
        if len(self._open) > self.most:
            most = max(self._idle.values(), key=len)
            self._close(next(iter(most)))

    def waits(self, one: Any, peer: str) -> None:
        """It waits for a request from now on."""
        if one in self._open:
            self._idle[peer][one] = None

    def works(self, one: Any, peer: str) -> None:
        """A whole request has come in over it."""
        self._idle[peer].pop(one, None)
        if not self._idle[peer]:
            del self._idle[peer]

    def closed(self, one: Any, peer: str) -> None:
        """It is gone."""
        self._open.discard(one)
        self.works(one, peer)

    def _close(self, one: Any) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._told_at >= _PATIENCE_S:
            self._told_at = now
            logger.warning("%d connections, the most there may be: idle ones are closed", self.most)
        one.drop()


class Guarded(HttpToolsProtocol):
    """One connection, uvicorn's, whose requests come in in time; `guarded` names its siblings."""

    siblings: ClassVar[Connections]
    _timer: asyncio.TimerHandle | None = None
    _peer = ""
    _whole = 0  # requests that have come in and are not answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        self._limit(self.siblings.headers_s)
        self.siblings.opened(self, self._peer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Be forgotten."""
        self._limit(None)
        self.siblings.closed(self, self._peer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for a request, also after what ended uvicorn's own wait and begins none."""
        super().data_received(data)
        if not self._whole and self._timer is None:
            self._limit(self.siblings.headers_s)

    def on_message_begin(self) -> None:
        """Wait for the rest of a request's head."""
        super().on_message_begin()
        self._limit(self.siblings.headers_s)

    def on_headers_complete(self) -> None:
        """Wait for the rest of a request, which may be answered before."""
        self._limit(self.siblings.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Have a whole request."""
        self._limit(None)
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._whole += 1
            self.siblings.works(self, self._peer)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has come in."""
        super().on_response_complete()
        self._whole = max(0, self._whole - 1)  # 0: it was answered before it had come in
        if not self._whole:
            self.siblings.waits(self, self._peer)

    def drop(self) -> None:
        """Close it now."""
        self.transport.abort()
        self.siblings.closed(self, self._peer)

    def _limit(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.drop) if seconds else None


def guarded(connections: Connections) -> type[asyncio.Protocol]:
    """The protocol of these connections, for uvicorn."""
    return type("Guarded", (Guarded,), {"siblings": connections})

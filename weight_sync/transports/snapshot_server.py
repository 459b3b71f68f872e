"""Server of snapshots over HTTP, in the learner's process: what actors that come late download.

A snapshot is one file without a name on the learner's disk, gone with its last reader: it takes no
second copy of the model in memory, and a learner that is killed leaves nothing. The kernel sends it
(`sendfile`) for a thread with an event loop of its own. Serves GET of a path that only who knows
the key can sign; listens on one address, on any free port. Connections that ask for nothing, and
who does not read on, are given up; of downloads so many at once are served, others are told to ask
again.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO

import torch
from aiohttp import web

from weight_sync.protocol import TransportFailed
from weight_sync.transports.download import SCHEME, signature
from weight_sync.transports.snapshot import write_all

log = logging.getLogger(__name__)

AT_ONCE = 4  # downloads
SPARE_BYTES = 1 << 30  # of the disk are left to others
_SLICE_BYTES = 1 << 20
_ASK_S = 10.0  # for a connection's request
_END_S = 10.0  # of the thread
_GRACE_S = 0.05  # of what is under way then; to aiohttp 0 is no limit


@dataclass(frozen=True)
class Snapshot:
    """A version as an open file; `path` is what is asked for."""

    path: str
    file: FileIO
    size: int


class SnapshotServer:
    """Serves one snapshot at a time; `offer`, `withdraw` and `close` belong to one thread."""

    def __init__(
        self, address: str, folder: str, stall_s: float, bytes_per_s: float | None = None
    ) -> None:
        """Listen on `address`; snapshots lie in `folder`. `stall_s`: how long a megabyte may take;
        `bytes_per_s`: of all downloads together, None: unbounded. Raises TransportFailed.
        """
        self.key = secrets.token_hex(32)
        self.sent_bytes = 0
        self._folder, self._stall_s, self._bytes_per_s = folder, stall_s, bytes_per_s
        self._lock = threading.Lock()
        self._offered: Snapshot | None = None
        self._running = 0
        self._due = 0.0  # when the next slice may go
        try:
            self._listener = socket.create_server((address, 0), family=_family(address))
        except OSError as error:
            raise TransportFailed(f"snapshots cannot be served at {address}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.SelectorEventLoop()  # it alone is sure to have sendfile
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="weight-snapshots", daemon=True)
        self._thread.start()

    def offer(self, buckets: Sequence[torch.Tensor]) -> str:
        """Write a snapshot, which replaces the last one, and return its path. Raises
        TransportFailed where the disk has no room for it.
        """
        self.withdraw()
        size = sum(map(len, buckets))
        try:
            room = os.statvfs(self._folder)
            if (free := room.f_bavail * room.f_frsize) < size + SPARE_BYTES:
                needed = f"{size / 1e9:.2g} GB beside {SPARE_BYTES / 1e9:.2g} GB are needed"
                raise OSError(f"{needed}, {free / 1e9:.2g} GB are free")
            file = _written(self._folder, buckets)
        except OSError as error:
            raise TransportFailed(f"no snapshot in {self._folder}: {error}") from error
        with self._lock:
            self._offered = Snapshot(f"/snapshots/{secrets.token_hex(8)}", file, size)
            return self._offered.path

    def withdraw(self) -> None:
        """Offer nothing any more; downloads under way go on to the end of their connection."""
        with self._lock:
            offered, self._offered = self._offered, None
        if offered is not None:
            offered.file.close()

    def close(self) -> None:
        """Break off what is under way and stop listening."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_END_S)
        self.withdraw()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = web.Server(
            self._answer, handler_cancellation=True, keepalive_timeout=_ASK_S, access_log=None
        )
        async with await self._loop.create_server(server, sock=self._listener):
            await self._over.wait()
            await server.shutdown(_GRACE_S)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            asked = request.http_range
        except ValueError:
            return _refusal(416, "not one range of bytes")
        first = asked.start or 0
        if not self._signed(request, first):
            log.warning("refused a download by %s: its key is not this run's", request.remote)
            return _refusal(401, "the key is not this run's")
        if request.method != "GET":
            return _refusal(405, "snapshots are read")
        with self._lock:
            offered = self._offered
            if offered is None or offered.path != request.path:
                return _refusal(410, "the snapshot has been withdrawn: newer weights serve")
            if not 0 <= first < offered.size or asked.stop is not None:
                return _refusal(416, f"from one of {offered.size} bytes to the end")
            if self._running >= AT_ONCE:
                return _refusal(503, f"{AT_ONCE} downloads are under way")
            file = FileIO(os.dup(offered.file.fileno()))
        self._running += 1
        try:
            return await self._send(request, file, first, offered.size)
        finally:
            self._running -= 1
            file.close()

    def _signed(self, request: web.BaseRequest, first: int) -> bool:
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        due = signature(self.key, request.path, first)
        return scheme == SCHEME and hmac.compare_digest(shown.encode(), due.encode())

    async def _send(
        self, request: web.BaseRequest, file: FileIO, first: int, size: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=206)
        response.content_length = size - first
        response.headers["Content-Range"] = f"bytes {first}-{size - 1}/{size}"
        response.force_close()
        try:
            await response.prepare(request)
            while first < size:
                count = min(_SLICE_BYTES, size - first)
                await self._turn(count)
                await self._send_slice(request, file, first, count)
                first += count
            await response.write_eof()
        except (OSError, TimeoutError, RuntimeError) as error:
            log.info("a download by %s broke at byte %d: %r", request.remote, first, error)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send_slice(
        self, request: web.BaseRequest, file: FileIO, first: int, count: int
    ) -> None:
        if request.transport is None:
            raise ConnectionResetError("its reader has left")
        async with asyncio.timeout(self._stall_s):
            await self._loop.sendfile(request.transport, file, first, count)
        self.sent_bytes += count

    async def _turn(self, count: int) -> None:
        """Wait until so many bytes may be sent."""
        if self._bytes_per_s is None:
            return
        begin = max(time.monotonic(), self._due)
        self._due = begin + count / self._bytes_per_s
        await asyncio.sleep(begin - time.monotonic())


def _written(folder: str, buckets: Sequence[torch.Tensor]) -> FileIO:
    """An open file of the buckets that has no name, and ends with its last descriptor."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile(buffering=0, dir=folder))
        write_all(file, buckets)
        stack.pop_all()
        return file


def _refusal(status: int, cause: str) -> web.Response:
    response = web.Response(status=status, text=f"{cause}\n")
    response.force_close()
    return response


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]

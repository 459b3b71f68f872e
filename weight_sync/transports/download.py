"""Transport by HTTP: an actor downloads a snapshot from the learner's host, by itself.

It has no group and waits for no other rank. A link that breaks is taken up again at the next byte
(`Range`); whoever receives compares the digest of all of it. Requests are signed with the key that
the learner told over the control channel, which does not cross the network here. A download ends
when no byte has come for some times `timeout_s`, when it is refused, and at its deadline.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Self

import torch
from blake3 import blake3

from weight_sync.protocol import Rendezvous, TransportFailed

SCHEME = "Forage-Blake3"  # of the Authorization header
_PIECE_BYTES = 1 << 20
PATIENCE = 5  # times `timeout_s`: how long no byte may come
_LEAST_S = 0.01  # of an attempt
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # before the link is tried again


class _Broken(Exception):
    """The link broke, or the learner serves as many as it can: the rest can still come."""

    def __init__(self, cause: str, busy: bool = False) -> None:
        super().__init__(cause)
        self.busy = busy


class DownloadTransport:
    """The receiving side; the other one is `weight_sync.transports.snapshot_server`."""

    kind = "http"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._url = f"http://{rendezvous.store_host}:{rendezvous.store_port}{rendezvous.prefix}"
        self._closed = threading.Event()
        self._socket: socket.socket | None = None

    @classmethod
    def join(cls, rendezvous: Rendezvous) -> Self:
        """Do nothing yet: there is nobody to meet."""
        return cls(rendezvous)

    def form(self) -> Self:
        """Do nothing."""
        return self

    def broadcast(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Fill the buckets, in order. Raises TransportFailed, which names the URL."""
        views = [memoryview(bucket.numpy()) for bucket in buckets]
        size, done, pause_s = sum(map(len, views)), 0, _FIRST_PAUSE_S
        end = heard = time.monotonic()
        end += timeout_s
        while done < size:
            before = done
            try:
                for piece in self._pieces(done, size, end):
                    _place(views, done, piece)
                    done += len(piece)
                    heard = time.monotonic()
            except _Broken as error:
                now, silent_s = time.monotonic(), PATIENCE * self.rendezvous.timeout_s
                heard = now if error.busy else heard
                if now >= end or now - heard >= silent_s:
                    limit_s = timeout_s if now >= end else silent_s
                    raise self._failed(f"{done} of {size} bytes, {limit_s:g} s: {error}") from error
                pause_s = _FIRST_PAUSE_S if done > before else min(2 * pause_s, _LONGEST_PAUSE_S)
                self._closed.wait(min(pause_s, end - now))

    def place(self) -> str:
        """The device of a receiver's buckets: its host."""
        return "cpu"

    def close(self) -> None:
        """End a download that is under way; from any thread."""
        self._closed.set()
        if (link := self._socket) is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _pieces(self, first: int, size: int, end: float) -> Iterator[bytes]:
        """The bytes from `first` on, over one connection. Raises _Broken, TransportFailed."""
        if self._closed.is_set():
            raise self._failed("it was given up")
        limit_s = max(_LEAST_S, min(self.rendezvous.timeout_s, end - time.monotonic()))
        link = HTTPConnection(
            self.rendezvous.store_host, self.rendezvous.store_port, timeout=limit_s
        )
        try:
            response = self._asked(link, first, size)
            while first < size:
                if time.monotonic() >= end:
                    raise _Broken("the deadline has passed")
                piece = response.read1(min(_PIECE_BYTES, size - first))
                if not piece:
                    raise _Broken("the connection was closed")
                first += len(piece)
                yield piece
        except (OSError, HTTPException) as error:
            raise _Broken(f"{type(error).__name__}: {error}") from error
        finally:
            self._socket = None
            link.close()

    def _asked(self, link: HTTPConnection, first: int, size: int) -> HTTPResponse:
        """The head of the answer that holds the bytes from `first` on."""
        path = self.rendezvous.prefix
        link.connect()
        self._socket = link.sock
        headers = {
            "Range": f"bytes={first}-",
            "Authorization": f"{SCHEME} {signature(self.rendezvous.key, path, first)}",
        }
        link.request("GET", path, headers=headers)
        response = link.getresponse()
        if response.status == 503:
            raise _Broken("the learner serves others", busy=True)
        if response.status != 206:
            said = response.read(200).decode(errors="replace").strip()
            raise self._failed(f"{response.status} {response.reason}: {said}")
        told, due = response.getheader("Content-Range"), f"bytes {first}-{size - 1}/{size}"
        if told != due:
            raise self._failed(f"it holds {told!r} where {due!r} is due")
        return response

    def _failed(self, cause: str) -> TransportFailed:
        return TransportFailed(f"{self._url}: {cause}")


def signature(key: str, path: str, first: int) -> str:
    """What shows, for one request, that its sender has the key."""
    return blake3(f"{path} {first}".encode(), key=bytes.fromhex(key)).hexdigest()


def _place(views: Sequence[memoryview], first: int, piece: bytes) -> None:
    """Copy a piece to where it belongs in the buckets."""
    left = memoryview(piece)
    for view in views:
        if first < len(view):
            count = min(len(left), len(view) - first)
            view[first : first + count] = left[:count]
            left, first = left[count:], 0
            if not len(left):
                return
        else:
            first -= len(view)

"""A stream socket between two ranks of the learner: calls one way, failures and ends both ways.

A thread reads, so the peer's end is noticed whatever the main thread waits in. Frames are msgpack:
nothing received is executed.
"""

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from learner.errors import RankLost

Message = tuple[str, Any]  # name and value
CLOSE = "close"  # the last message of a rank that leaves in order: its end is not reported
_HEADER = struct.Struct(">Q")
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5}  # seconds, seconds, probes
_UNHEARD_MS = 10_000  # how long what was sent may stay without a sign of it


class Link:
    """One connected peer, called `peer` in messages."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer, self._connection = peer, connection
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._end = ""  # how the peer ended
        self._on_end: Callable[[str], None] | None = None
        if connection.family != socket.AF_UNIX:  # a machine that loses power closes nothing
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in {**_KEEPALIVE, "TCP_USER_TIMEOUT": _UNHEARD_MS}.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"link to {peer}")
        self._reader.start()

    def watch(self, peer: str, on_end: Callable[[str], None]) -> None:
        """Name the peer; call `on_end(message)` once, on a thread, if it fails or just goes."""
        with self._ending:
            self.peer, self._on_end, end = peer, on_end, self._end
        if end:
            on_end(f"{peer} {end}")

    def send(self, name: str, value: Any = None) -> None:
        """Send a message. Raises RankLost when the peer is gone."""
        frame = msgspec.msgpack.encode((name, value))
        try:
            with self._sending:
                self._connection.sendall(_HEADER.pack(len(frame)))
                self._connection.sendall(frame)
        except OSError as error:
            raise RankLost(f"{self.peer} is gone: {error}") from error

    def receive(self, deadline_s: float | None = None) -> Message:
        """The peer's next message; no deadline: wait while the peer lives. Raises RankLost."""
        try:
            message = self._inbox.get(timeout=deadline_s)
        except queue.Empty:
            raise RankLost(f"{self.peer} has said nothing for {deadline_s:g} s") from None
        if message is None:
            raise RankLost(f"{self.peer} {self._end}")
        return message

    def close(self) -> None:
        """Close the connection."""
        with self._ending:
            self._on_end = None
        with contextlib.suppress(OSError):  # the peer may have hung up first
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the reader, which close does not
        if self._reader is not threading.current_thread():
            self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        end, announced = "is gone", False
        try:
            with self._connection.makefile("rb") as stream:
                while header := stream.read(_HEADER.size):
                    frame = stream.read(_HEADER.unpack(header)[0])
                    name, value = msgspec.msgpack.decode(frame, type=Message)
                    if name == "failed":
                        end = f"failed: {value}"
                        break
                    announced = name == CLOSE
                    self._inbox.put((name, value))
        except (OSError, struct.error, msgspec.DecodeError) as error:
            end = f"is gone: {error}"
        with self._ending:
            self._end, on_end = end, self._on_end
        self._inbox.put(None)
        if on_end is not None and not announced:
            on_end(f"{self.peer} {end}")

"""The guard of a socket that others connect to over TCP: who may, as what, and how many at once may
have yet to show a key.

A connection is proved once our WELCOME has been received, which goes only to who knows our key;
that takes a client milliseconds. One whose handshake is not over by `HANDSHAKE_S` is closed; one
that sends more than a handshake has before it is proved, soon; and where more than a quarter of the
process's descriptors would be held so, the oldest at once: strangers with any number of connections
take neither descriptors nor memory from who has a key.
"""

import contextlib
import logging
import socket as socketlib
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from configs.runtime.process import descriptors

HANDSHAKE_S = 5.0
MOST_UNPROVED = 1024
LOG_EVERY_S = 10.0
SWEEP_S = 0.2
# tcpi_bytes_acked and tcpi_bytes_received of linux/tcp.h
_TCP_INFO_BYTES, _COUNTS = 192, struct.Struct("<120xQQ")
_WELCOMED_BYTES = 64 + 170  # our greeting and WELCOME; none is sent without a HELLO for our key
_MOST_UNPROVED_BYTES = 4096  # a greeting (64) and a HELLO (202) are all that one may send before
_REFUSED = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it broke off the handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak CurveZMQ with our key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not this run's",
}
_COUNTED = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED
logger = logging.getLogger(__name__)


class Guard:
    """Admits the keys of `roles` (public key → role), and logs who is refused; close it before the
    context.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        socket: "zmq.Socket[bytes]",
        roles: Mapping[bytes, str],
    ) -> None:
        self._roles = {key.decode(): role for key, role in roles.items()}
        self._told: dict[str, tuple[float, int]] = {}  # by cause: when, and how many since
        self._unproved = Unproved(min(MOST_UNPROVED, descriptors() // 4))
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        socket.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        self._socket, self._over = socket, threading.Event()
        self._monitor = socket.get_monitor_socket(sum(_REFUSED) | _COUNTED)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="refusals")
        self._thread.start()

    def callback(self, _domain: str, key: bytes) -> bool:
        """True where a client's key is this run's."""
        return key.decode() in self._roles

    def role(self, user_id: object) -> str:
        """Return the role of who sent a frame, by its `User-Id`."""
        return self._roles.get(str(user_id), "")

    def close(self) -> None:
        """End both threads."""
        self._over.set()
        self._thread.join()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._authenticator.stop()

    def _watch(self) -> None:
        swept_s = time.monotonic()
        while not self._over.is_set():
            if self._monitor.poll(int(SWEEP_S * 1000)):
                self._heed(recv_monitor_message(self._monitor))
            if time.monotonic() - swept_s >= SWEEP_S:
                self._unproved.sweep()
                swept_s = time.monotonic()

    def _heed(self, event: Mapping[str, Any]) -> None:
        kind = zmq.Event(event["event"])
        if kind == zmq.EVENT_ACCEPTED:
            self._unproved.add(event["value"])
        elif kind == zmq.EVENT_DISCONNECTED:
            self._unproved.discard(event["value"])
        elif kind == zmq.EVENT_ACCEPT_FAILED:
            self._unproved.make_room()
            self._tell(event["endpoint"], "there is no descriptor left for it (ulimit -n)")
        elif cause := _REFUSED.get(kind):
            self._tell(event["endpoint"], cause)

    def _tell(self, endpoint: bytes, cause: str) -> None:
        """Log a refusal: the first of its kind, then how many there were since."""
        now_s, (told_s, count) = time.monotonic(), self._told.get(cause, (-LOG_EVERY_S, 0))
        if now_s - told_s < LOG_EVERY_S:
            self._told[cause] = told_s, count + 1
            return
        self._told[cause] = now_s, 0
        others = f" (and {count} others before it)" if count else ""
        place = endpoint.decode(errors="replace")
        logger.warning("refused a connection to %s: %s%s", place, cause, others)


class Unproved:
    """The connections that may not have shown a key yet, by descriptor, the oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: dict[int, None] = {}

    def add(self, descriptor: int) -> None:
        """Count one in that was just accepted; close the oldest where there are too many."""
        self._connections.pop(descriptor, None)
        self._connections[descriptor] = None
        while len(self._connections) > self._most:
            self._close_oldest()

    def discard(self, descriptor: int) -> None:
        """Forget one that has ended."""
        self._connections.pop(descriptor, None)

    def make_room(self) -> None:
        """Close a quarter of them: the process has no descriptor left."""
        self.sweep()
        for _ in range(min(len(self._connections), 1 + self._most // 4)):
            self._close_oldest()

    def sweep(self) -> None:
        """Forget those that are proved; close those that send what only proved ones may."""
        for descriptor in list(self._connections):
            acked, received = _counts(descriptor)
            if acked >= _WELCOMED_BYTES:
                del self._connections[descriptor]
            elif received > _MOST_UNPROVED_BYTES:
                self._close(descriptor)

    def _close_oldest(self) -> None:
        descriptor = next(iter(self._connections))
        if _counts(descriptor)[0] < _WELCOMED_BYTES:
            self._close(descriptor)
        else:
            del self._connections[descriptor]

    def _close(self, descriptor: int) -> None:
        del self._connections[descriptor]
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            connection.shutdown(socketlib.SHUT_RDWR)  # its owner, ZeroMQ, closes it


def _counts(descriptor: int) -> tuple[int, int]:
    """How many bytes the peer of a connection has received, and how many it has sent: those of a
    proved one where it has ended, or where the kernel does not count.
    """
    told = b""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        told = connection.getsockopt(socketlib.IPPROTO_TCP, socketlib.TCP_INFO, _TCP_INFO_BYTES)
    if len(told) < _COUNTS.size:
        return _WELCOMED_BYTES, 0
    acked, received = _COUNTS.unpack_from(told)
    return acked, received


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socketlib.socket]:
    """The socket of a descriptor that another owns. Raises OSError where there is none now."""
    connection = socketlib.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()

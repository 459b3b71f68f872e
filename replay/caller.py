"""A connection to replay that asks and waits: what its blocking clients have in common.

Consumes replies; every wait has a name and a deadline, and a Wait of replay's is logged.
"""

import logging
import math
import time
from typing import Self, TypeVar

import zmq
import zmq.asyncio

import replay.protocol as wire
from configs.keys import Keys
from replay.codec import decode_reply, encode
from replay.protocol import RefusedByReplay, ReplayTimeout, Stop

LINGER_MS = 1000
LOG_EVERY_S = 10.0
logger = logging.getLogger("replay.client")
_T = TypeVar("_T", bound=wire.Reply)


def dealer(
    socket: "zmq.Socket[bytes] | zmq.asyncio.Socket",
    endpoint: str,
    silence_s: float,
    keys: Keys | None,
) -> None:
    """Connect; ZeroMQ's own heartbeats run on its I/O thread, so they go on while this process
    computes.
    """
    silence_ms = max(1, int(silence_s * 1000))
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.SNDTIMEO, silence_ms)
    socket.set(zmq.HEARTBEAT_IVL, max(1, silence_ms // 10))
    socket.set(zmq.HEARTBEAT_TIMEOUT, silence_ms)
    if keys is not None:
        keys.present(socket)
    socket.connect(endpoint)


class Caller:
    """A blocking connection, made anew after a ReplayTimeout: a late reply is nobody else's."""

    def __init__(
        self, endpoint: str, reply_deadline_s: float = 10.0, keys: Keys | None = None
    ) -> None:
        self._endpoint, self._reply_deadline_s, self._keys = endpoint, reply_deadline_s, keys
        self._logged_s = -math.inf
        self._context = zmq.Context()
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; closing twice is harmless."""
        self._context.destroy(linger=LINGER_MS)

    def _connect(self) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer(self._socket, self._endpoint, self._reply_deadline_s, self._keys)

    def _call(self, request: wire.Request, wanted: type[_T], what: str) -> _T | Stop:
        return self._checked(self._wait(request, what, math.inf)[0], wanted, what)

    def _send(self, request: wire.Request, what: str) -> None:
        try:
            self._socket.send(encode(request))
        except zmq.Again as error:
            raise self._timeout(what, self._reply_deadline_s, "no room to send") from error

    def _receive(self, what: str, limit_s: float) -> wire.Reply:
        if not self._socket.poll(int(limit_s * 1000)):
            raise self._timeout(what, limit_s, "no answer")
        return decode_reply(self._socket.recv())

    def _wait(
        self, request: wire.Request, what: str, deadline_s: float
    ) -> tuple[wire.Reply, dict[bool, float]]:
        """Ask once; replay says Wait until it has the answer. Also seconds waited, by `oldest`."""
        start_s = since_s = time.monotonic()
        waited_s = {False: 0.0, True: 0.0}
        oldest = False
        self._send(request, what)
        while isinstance(reply := self._receive(what, self._reply_deadline_s), wire.Wait):
            now_s = time.monotonic()
            waited_s[oldest] += now_s - since_s
            since_s, oldest = now_s, reply.oldest
            if now_s - start_s >= deadline_s:
                raise self._timeout(what, now_s - start_s, reply.reason)
            self._log(what, reply.reason)
        waited_s[oldest] += time.monotonic() - since_s
        return reply, waited_s

    def _log(self, what: str, reason: str) -> None:
        if (now_s := time.monotonic()) - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            logger.info("waiting for %s: %s", what, reason)

    def _checked(self, reply: wire.Reply, wanted: type[_T], what: str) -> _T | Stop:
        if isinstance(reply, wanted | Stop):
            return reply
        cause = getattr(reply, "cause", f"the answer was {type(reply).__name__}")
        raise RefusedByReplay(f"{what}: {cause}")

    def _timeout(self, what: str, waited_s: float, reason: str) -> ReplayTimeout:
        self._socket.close(linger=0)
        self._connect()
        place = f"replay at {self._endpoint}"
        return ReplayTimeout(f"waited {waited_s:.1f} s for {what} from {place}: {reason}")

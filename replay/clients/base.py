"""The base of replay's blocking clients: a connection that asks and waits.

Every wait has a name and a deadline, and a Wait of replay's is logged. Every request may be
repeated: one that is not answered is asked again on a new connection, for replay may have been
killed and started again.
"""

import contextlib
import logging
import math
import time
from typing import Self, TypeVar

import zmq
import zmq.asyncio

import replay.protocol as wire
from configs.keys import LEARNER, Keys
from replay.codec import MAX_REPLY_BYTES, decode_reply, encode

LINGER_MS = 1000
LOG_EVERY_S = 10.0
_SENDS = 3  # of a request, each on a new connection
RESTART_DEADLINE_S = 120.0
_ANSWERS: dict[type[wire.Request], type[wire.Reply]] = {
    wire.Resume: wire.Resumed,
    wire.Sample: wire.Batch,
    wire.SamplePart: wire.BatchPart,
    wire.Evaluate: wire.EvalProgress,
    wire.Observe: wire.Status,
}  # of any other: Done
logger = logging.getLogger(__name__)
_T = TypeVar("_T", bound=wire.Reply)


def dealer(
    socket: "zmq.Socket[bytes] | zmq.asyncio.Socket",
    endpoint: str,
    silence_s: float,
    keys: Keys | None,
    role: str,
) -> None:
    """Connect; ZeroMQ's own heartbeats go on, on its I/O thread, while this process computes."""
    silence_ms = max(1, int(silence_s * 1000))
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.SNDTIMEO, silence_ms)
    socket.set(zmq.HEARTBEAT_IVL, max(1, silence_ms // 10))
    socket.set(zmq.HEARTBEAT_TIMEOUT, silence_ms)
    socket.set(zmq.HANDSHAKE_IVL, silence_ms)  # until its end there are no heartbeats
    socket.set(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
    if keys is not None:
        keys.present(socket, role)
    socket.connect(endpoint)


def connect_anew(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str) -> None:
    """Connect a socket whose connection ended for good, as ZeroMQ's do by a broken handshake or an
    encrypted stream that was changed on the way.
    """
    with contextlib.suppress(zmq.ZMQError):
        socket.disconnect(endpoint)
    socket.connect(endpoint)


def is_late(request: wire.Request, reply: wire.Reply | None) -> bool:
    """Return True if this is the answer to another question, asked before."""
    match request, reply:
        case wire.Sample(), wire.Batch(step):
            return step != request.step + 1
        case wire.SamplePart(), wire.BatchPart(step, part):
            return (step, part) != (request.step, request.part)
        case wire.Evaluate(), wire.EvalProgress(_, _, result):
            return result is not None and result.step != request.step
        case _:
            answer = _ANSWERS.get(type(request), wire.Done)
            return isinstance(reply, (*_ANSWERS.values(), wire.Done)) and type(reply) is not answer


class Caller:
    """A blocking connection, made anew after each silence: a late reply is nobody else's.

    Replay is asked again when it says nothing for `reply_deadline_s`, until it has been silent for
    `restart_deadline_s`; where that is shorter, it is asked once.
    """

    role = LEARNER  # whose key it shows

    def __init__(
        self,
        endpoint: str,
        reply_deadline_s: float = 10.0,
        keys: Keys | None = None,
        restart_deadline_s: float = RESTART_DEADLINE_S,
    ) -> None:
        self._endpoint, self._reply_deadline_s, self._keys = endpoint, reply_deadline_s, keys
        self._silence_s = max(reply_deadline_s, restart_deadline_s)
        self._logged_s = -math.inf
        self._spent_s = 0.0  # of the deadline of the last question
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
        dealer(self._socket, self._endpoint, self._reply_deadline_s, self._keys, self.role)

    def _call(self, request: wire.Request, wanted: type[_T], what: str) -> _T | wire.Stop:
        return self._checked(self._wait(request, what, math.inf)[0], wanted, what)

    def _send(self, request: wire.Request) -> None:
        while self._socket.poll(0):
            self._socket.recv()  # what came before the question answers another
        for _ in range(_SENDS):
            try:
                self._socket.send(encode(request), zmq.NOBLOCK)
            except zmq.Again:
                self._connect_anew()  # it has ended for good
            else:
                return  # where none is sent, nothing answers

    def _receive(self, limit_s: float) -> wire.Reply | None:
        """Return the next reply; None where none comes in time, or one side's was garbled."""
        if not self._socket.poll(max(1, math.ceil(limit_s * 1000))):
            return None
        try:
            reply = decode_reply(self._socket.recv())
        except wire.Garbled as error:
            logger.warning("lost a message of replay's: %s", error)
            return None
        return None if isinstance(reply, wire.Unknown) else reply

    def _wait(
        self, request: wire.Request, what: str, deadline_s: float, silence_s: float | None = None
    ) -> tuple[wire.Reply, dict[bool, float]]:
        """Ask until replay answers; it says Wait until it can. Also seconds waited, by `oldest`.

        Raises ReplayTimeout when it only said Wait for `deadline_s`, the time left out in which it
        was being restored and got on, or nothing for `silence_s` (default: as long as a restart may
        take).
        """
        limit_s = self._silence_s if silence_s is None else silence_s
        start_s = since_s = heard_s = time.monotonic()
        waited_s = {False: 0.0, True: 0.0}
        oldest, reason, restored = False, "no answer", 0
        self._send(request)
        while True:
            reply = self._receive(min(self._reply_deadline_s, heard_s + limit_s - since_s))
            now_s = time.monotonic()
            waited_s[oldest] += now_s - since_s
            if isinstance(reply, wire.Wait) and reply.restored > restored:
                start_s, restored = start_s + now_s - since_s, reply.restored  # it comes back
            since_s = now_s
            if is_late(request, reply):
                continue
            if reply is not None and not isinstance(reply, wire.Wait):
                self._spent_s = now_s - start_s
                return reply, waited_s
            if reply is not None:
                heard_s, oldest, reason = now_s, reply.oldest, reply.reason
            if now_s - start_s >= deadline_s or now_s - heard_s >= limit_s:
                reason = "no answer" if now_s - heard_s >= limit_s else reason
                raise self._timeout(what, now_s - start_s, reason)
            if reply is None:
                self._connect_anew()
                self._send(request)
            self._log(what, reason if reply else f"no answer for {now_s - heard_s:.1f} s")

    def _log(self, what: str, reason: str) -> None:
        if (now_s := time.monotonic()) - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            logger.info("waiting for %s: %s", what, reason)

    def _checked(self, reply: wire.Reply, wanted: type[_T], what: str) -> _T | wire.Stop:
        if isinstance(reply, wanted | wire.Stop):
            return reply
        cause = getattr(reply, "cause", f"the answer was {type(reply).__name__}")
        raise wire.RefusedByReplay(f"{what}: {cause}")

    def _connect_anew(self) -> None:
        self._socket.close(linger=0)
        self._connect()

    def _timeout(self, what: str, waited_s: float, reason: str) -> wire.ReplayTimeout:
        self._connect_anew()
        place = f"replay at {self._endpoint}"
        return wire.ReplayTimeout(f"waited {waited_s:.1f} s for {what} from {place}: {reason}")

"""The control sockets: the learner's ROUTER, which passes on messages of actors that have joined,
and an actor's DEALER. A `Channel` is all that the broadcast sees of the learner's.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec
import zmq
import zmq.asyncio

from configs.keys import ACTOR, Keys
from weight_sync.protocol import (
    PROTOCOL,
    Answer,
    Enquiry,
    FromActor,
    FromLearner,
    Join,
    Ping,
    Refused,
    WeightSyncError,
    decode_from_actor,
    decode_from_learner,
    encode,
)

log = logging.getLogger(__name__)
HEARTBEAT_MS = 1000
SILENT_MS = 10_000
_RIVAL_S = 12.0  # a connection that broke without a word is known to be dead by then


class Closing(WeightSyncError):
    """The thread that receives is asked to stop."""


@dataclass(frozen=True)
class LearnerHost:
    """The learner's `device` (see `device_name`), `address` for stores, `folder` for snapshots, and
    `node` (see `own_node`); `serves`: the address is one that other machines may reach.
    """

    device: str
    address: str
    folder: str
    node: str
    serves: bool = False


class Channel(Protocol):
    """The learner's control socket, as the broadcast needs it."""

    @property
    def joined(self) -> Sequence[str]:
        """Actors that have joined, sorted."""

    def send(self, actor_id: str, message: FromLearner) -> bool:
        """Send; False when the actor's connection is gone."""

    def drop(self, actor_id: str) -> None:
        """Forget an actor; it may join again."""

    def receive(self, deadline: float | None) -> Join | Answer | None:
        """Return the next message; None at the deadline (monotonic seconds) or when interrupted.
        A Join comes from an actor that was not there, or that is back on another connection.
        """


class RouterChannel:
    """The ROUTER that actors join at, and a bell by which another thread interrupts `receive`."""

    def __init__(self, endpoint: str, keys: Keys | None, incarnation: int) -> None:
        """Raises WeightSyncError when the endpoint cannot be bound."""
        self.closing = False
        self._ping = Ping(incarnation)
        self._routing_ids: dict[str, bytes] = {}
        self._rivals: dict[bytes, float] = {}  # since when they claim an actor's id
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._bell, self._wake = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._wake.bind("inproc://bell")
        self._bell.connect("inproc://bell")
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.TCP_MAXRT, SILENT_MS)
        self._guard = keys.make().guard(self._context, self._router) if keys else None
        if not keys:  # libzmq 4.3.5 aborts where an encrypted stream that it heartbeats breaks
            self._router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise WeightSyncError(
                f"weight_sync.endpoint {endpoint!r}: cannot listen: {error}"
            ) from error

    @property
    def joined(self) -> Sequence[str]:
        """Actors that have joined, sorted."""
        return sorted(self._routing_ids)

    def ring(self) -> None:
        """Interrupt `receive`; of one other thread only."""
        if self._bell.poll(0, zmq.POLLOUT):
            self._bell.send(b"")

    def send(self, actor_id: str, message: FromLearner) -> bool:
        """Send; False when the actor's connection is gone."""
        return self._send(self._routing_ids[actor_id], message)

    def drop(self, actor_id: str) -> None:
        """Forget an actor; it may join again."""
        self._routing_ids.pop(actor_id, None)

    def receive(self, deadline: float | None) -> Join | Answer | None:
        """Return the next message; None at the deadline, a bell or no news. Raises Closing."""
        left_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
        poller = zmq.Poller()
        for readable in (self._router, self._wake):
            poller.register(readable, zmq.POLLIN)
        ready = dict(poller.poll(left_ms))
        if self._wake in ready:
            self._wake.recv()
        if self.closing:
            raise Closing("closing")
        return self._take(*self._router.recv_multipart()) if self._router in ready else None

    def close(self) -> None:
        """Close the sockets; messages under way get half a second."""
        if self._guard is not None:
            self._guard.close()
        for each in (self._bell, self._wake, self._router):
            each.close(500)
        self._context.term()

    def _take(self, routing_id: bytes, *frames: bytes) -> Join | Answer | None:
        try:
            message: FromActor = decode_from_actor(b"".join(frames))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("dropped a message that is not of an actor: %s", error)
            return None
        if isinstance(message, Join | Enquiry):
            self._send(routing_id, self._ping)  # the learner lives, if it may publish nothing yet
        if isinstance(message, Enquiry):
            return None
        if isinstance(message, Join):
            return message if self._admit(routing_id, message) else None
        if self._routing_ids.get(message.actor_id) != routing_id:
            return None  # dropped meanwhile: it will join again
        return message

    def _admit(self, routing_id: bytes, join: Join) -> bool:
        """Return True for a new actor, or one on a new connection."""
        known = self._routing_ids.get(join.actor_id)
        if join.protocol != PROTOCOL:
            self._refuse(
                routing_id,
                f"{join.actor_id!r} speaks protocol {join.protocol!r}, the learner {PROTOCOL!r}",
            )
            return False
        if known == routing_id:
            return False
        if known is not None and self._send(known, self._ping):
            since = self._rivals.setdefault(routing_id, time.monotonic())
            if time.monotonic() - since >= _RIVAL_S:
                self._refuse(routing_id, f"an actor named {join.actor_id!r} has joined already")
            return False
        self._rivals.pop(routing_id, None)
        self._routing_ids[join.actor_id] = routing_id
        return True

    def _refuse(self, routing_id: bytes, cause: str) -> None:
        log.warning("refused: %s", cause)
        self._send(routing_id, Refused(cause))

    def _send(self, routing_id: bytes, message: FromLearner) -> bool:
        try:
            self._router.send_multipart([routing_id, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return True  # its queue is full: it stands, and does not read
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


class Link:
    """The actor's DEALER, a context manager; `peer` names the learner in errors."""

    def __init__(self, endpoint: str, keys: Keys | None, peer: str) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 500)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, SILENT_MS)
        if keys is not None:
            keys.present(dealer, ACTOR)
        dealer.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._dealer.close()
        self._context.term()

    async def send(self, message: FromActor) -> None:
        """Send one message. It is lost where the learner has long been gone or the connection has
        ended for good (bytes were changed on the way); Join goes out again, on a new connection.
        """
        try:
            await self._dealer.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            with contextlib.suppress(zmq.ZMQError):
                self._dealer.disconnect(self._endpoint)
            self._dealer.connect(self._endpoint)

    async def next(self, limit_s: float) -> FromLearner | None:
        """Return the next message; None where there is none within `limit_s`."""
        if not await self._dealer.poll(int(limit_s * 1000)):
            return None
        message: FromLearner = decode_from_learner(await self._dealer.recv())
        return message

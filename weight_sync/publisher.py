"""The learner's side of weight sync: versions in, verified actors out.

Consumes named tensors with a probe (`publish`, on the learner's thread) and the actors' messages (a
ROUTER); produces manifests and broadcast bytes, from one side thread. The side thread waits as
`broadcast` says, and between versions for a message, a new version or `close`. The learner's thread
waits only in `wait_for_actors` and `wait_applied`, and meets what ended the side thread there, in
`publish` or in `check`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import torch
import zmq

from configs.keys import Keys
from configs.schema import WeightSyncConfig
from weight_sync.broadcast import Broadcast
from weight_sync.protocol import (
    PROTOCOL,
    FromActor,
    FromLearner,
    Join,
    PeerFailed,
    Refused,
    SyncTimeout,
    WeightSyncError,
    decode_from_actor,
    encode,
)
from weight_sync.staging import Staging

log = logging.getLogger(__name__)

_HEARTBEAT_MS = 1000
_SILENT_MS = 10_000


class _ClosingError(WeightSyncError):
    """The side thread is asked to stop."""


class Publisher:
    """Publishes policy versions to `actors` actors; a context manager, or call `close`.

    Binds `endpoint` at once; raises WeightSyncError when it cannot.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        actors: int,
        incarnation: int,
        endpoint: str,
        keys: Keys | None = None,
    ) -> None:
        self._deadline_s, self._endpoint = config.publish_deadline_s, endpoint
        self._staging = Staging(config.bucket_bytes)
        self._changed = threading.Condition()
        self._waiting_for = ""
        self._formed = False
        self._published = self._applied = -1
        self._error: BaseException | None = None
        self._gauges: dict[str, float] = {"sync/updates": 0.0}
        self._channel = _RouterChannel(endpoint, actors, keys)
        broadcast = Broadcast(config, incarnation, self._channel, self._say)
        # Actors on this machine reach the store on the loopback; nothing else needs to.
        host = urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else None
        self._thread = threading.Thread(
            target=self._main,
            args=(broadcast, actors, host or "127.0.0.1"),
            name="weight-publisher",
            daemon=True,
        )
        self._thread.start()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_actors(self, deadline_s: float) -> None:
        """Wait until every actor is in the collective. Raises SyncTimeout, naming the missing."""
        self._wait(lambda: self._formed, deadline_s, "all actors to connect")

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        probe_tokens: Sequence[int],
        probe_logprobs: Sequence[float],
    ) -> None:
        """Copy the weights into staging and return; the side thread sends them when it is free.

        A version that is still waiting there is replaced. `probe_logprobs[i]` is of `probe_tokens[i
        + 1]`. Raises what ended the side thread, and ValueError on a version that does not go
        forwards.
        """
        self.check()
        if version <= self._published:
            raise ValueError(f"version {version!r} after {self._published!r}: versions go forwards")
        if len(probe_logprobs) != len(probe_tokens) - 1:
            raise ValueError(
                f"{len(probe_tokens)} probe tokens need {len(probe_tokens) - 1} log-probs, "
                f"got {len(probe_logprobs)!r}"
            )
        begun = time.perf_counter()
        self._staging.put(version, named_tensors, probe_tokens, probe_logprobs)
        self._published = version
        self._gauges["sync/publish_s"] = time.perf_counter() - begun
        self._channel.ring()

    def wait_applied(self, version: int, deadline_s: float) -> None:
        """Wait until every actor serves `version` or a newer one, verified.

        Raises VerificationFailed, ManifestMismatch, TransportFailed or SyncTimeout, naming the
        actor.
        """
        self._wait(lambda: self._applied >= version, deadline_s, f"version {version} to be applied")

    def check(self) -> None:
        """Raise what ended the side thread, if anything did."""
        if self._error is not None:
            raise self._error

    def gauges(self) -> dict[str, float]:
        """Numbers of the last completed sync; of the slowest actor where they differ."""
        return {**self._gauges, "sync/overtaken": float(self._staging.overtaken)}

    def close(self) -> None:
        """Stop the side thread and leave, after the collective under way if there is one."""
        self._channel.closing = True
        self._channel.ring()
        self._thread.join(self._deadline_s + 1.0)
        if not self._thread.is_alive():
            self._channel.close()
            scheme, _, path = self._endpoint.partition("://")
            if scheme == "ipc":  # ZeroMQ leaves it
                Path(path).unlink(missing_ok=True)

    def _wait(self, reached: Callable[[], bool], deadline_s: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or reached(), deadline_s)
            self.check()
            if not reached():
                raise SyncTimeout(
                    f"the learner waited {deadline_s:g} s for {what}: still waiting for "
                    f"{self._waiting_for}"
                )

    def _say(self, what: str) -> None:
        self._waiting_for = what

    def _main(self, broadcast: Broadcast, actors: int, host: str) -> None:
        """The side thread."""
        try:
            broadcast.form(actors, host)
            self._set(formed=True)
            while True:
                self._send_next(broadcast)
        except _ClosingError:
            log.debug("the publisher's thread ends")
        except WeightSyncError as error:
            log.error("weight sync ended: %s", error)
            self._set(error=error)
        except BaseException as error:
            self._set(error=error)
            raise
        finally:
            broadcast.close()

    def _send_next(self, broadcast: Broadcast) -> None:
        parcel = self._staging.take()
        if parcel is None:
            self._say("a version to be published")
            self._channel.receive(None)
            return
        gauges = broadcast.send_version(parcel)
        self._staging.release(parcel.buckets)
        gauges["sync/updates"] = self._gauges["sync/updates"] + 1.0
        self._gauges.update(gauges)
        self._set(applied=parcel.version)

    def _set(self, **changes: object) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self, f"_{name}", value)
            self._changed.notify_all()


class _RouterChannel:
    """The ROUTER that actors join at, and a bell by which another thread interrupts `receive`."""

    def __init__(self, endpoint: str, actors: int, keys: Keys | None) -> None:
        self.closing = False
        self._actors = actors
        self._routing_ids: dict[str, bytes] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._bell, self._wake = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._wake.bind("inproc://bell")
        self._bell.connect("inproc://bell")
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        self._guard = keys.make().guard(self._context, self._router) if keys else None
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise WeightSyncError(
                f"weight_sync.endpoint {endpoint!r}: cannot listen: {error}"
            ) from error

    @property
    def peers(self) -> Sequence[str]:
        """Actors that have joined, sorted."""
        return sorted(self._routing_ids)

    def ring(self) -> None:
        """Interrupt `receive`; of the learner's thread only."""
        if self._bell.poll(0, zmq.POLLOUT):
            self._bell.send(b"")

    def send(self, actor_id: str, message: FromLearner) -> None:
        """Send; raises PeerFailed naming the actor."""
        try:
            self._router.send_multipart([self._routing_ids[actor_id], encode(message)])
        except zmq.ZMQError as error:
            raise PeerFailed(
                f"{actor_id} has gone: could not send {type(message).__name__}: {error}"
            ) from error

    def receive(self, deadline: float | None) -> FromActor | None:
        """The next message; None at the deadline (monotonic seconds) or when the bell rang."""
        left_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
        poller = zmq.Poller()
        for readable in (self._router, self._wake):
            poller.register(readable, zmq.POLLIN)
        ready = dict(poller.poll(left_ms))
        if self._wake in ready:
            self._wake.recv()
        if self.closing:
            raise _ClosingError("closing")
        return self._take(*self._router.recv_multipart()) if self._router in ready else None

    def close(self) -> None:
        """Close the sockets; messages under way get half a second."""
        if self._guard is not None:
            self._guard.close()
        for each in (self._bell, self._wake, self._router):
            each.close(500)
        self._context.term()

    def _take(self, routing_id: bytes, payload: bytes) -> FromActor | None:
        try:
            message: FromActor = decode_from_actor(payload)
        except msgspec.DecodeError as error:
            log.warning("dropped a message that is not of an actor: %s", error)
            return None
        if isinstance(message, Join):
            return message if self._admit(routing_id, message) else None
        if self._routing_ids.get(message.actor_id) != routing_id:
            cause = f"{message.actor_id!r} sent {type(message).__name__} without having joined"
            self._refuse(routing_id, cause)
            return None
        return message

    def _admit(self, routing_id: bytes, join: Join) -> bool:
        cause = ""
        if join.protocol != PROTOCOL:
            cause = f"{join.actor_id!r} speaks protocol {join.protocol!r}, the learner {PROTOCOL!r}"
        elif join.actor_id in self._routing_ids:
            cause = f"an actor named {join.actor_id!r} has joined already"
        elif len(self._routing_ids) == self._actors:
            cause = f"{join.actor_id!r} is one too many: all {self._actors} actors have joined"
        if cause:
            self._refuse(routing_id, cause)
            return False
        self._routing_ids[join.actor_id] = routing_id
        return True

    def _refuse(self, routing_id: bytes, cause: str) -> None:
        log.warning("refused: %s", cause)
        self._router.send_multipart([routing_id, encode(Refused(cause))])

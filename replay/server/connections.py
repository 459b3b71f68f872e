"""Replay's socket and the connections on it: who speaks, who is silent, and what each is owed."""

import contextlib
import errno
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import zmq

import replay.protocol as wire
from configs.keys import LEARNER, Addresses
from configs.runtime.files import weights_bytes
from configs.runtime.guard import Guard
from configs.runtime.process import make_socket_dir
from configs.schema import Config
from replay.codec import MAX_REQUEST_BYTES, encode
from replay.ledger.events import Peer

WAIT_AGAIN_S = 0.5
QUIET_S = 2.0  # after the end, the console may still ask
GRACE_S = 5.0  # beyond the actors' own drain deadline
SELF = b""  # the peer of the server's own events; no routing id is empty
# Sent before the log is synced.
_PROMISES_NOTHING = wire.Alive | wire.Status | wire.Refused | wire.Unknown | wire.Wait
_ALIVE = encode(wire.Alive())  # half of all replies

logger = logging.getLogger(__name__)


class Router:
    """The bound ROUTER socket. Raises ReplayError where the run's endpoint cannot be bound."""

    def __init__(self, config: Config) -> None:
        self._address = Addresses.of(config).replay
        self._context = zmq.Context()
        self._guard: Guard | None = None
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._bind(config)
        except (zmq.ZMQError, OSError) as error:
            if self._guard is not None:
                self._guard.close()
            self._context.destroy(linger=0)
            raise wire.ReplayError(
                f"replay.endpoint = {self._address.endpoint!r} cannot be bound ({error}): "
                "end the process that uses it, or choose another"
            ) from error
        logger.info("listening on %s", self._address.endpoint)

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message; True where one has arrived."""
        return bool(self._socket.poll(max(0, int(timeout_s * 1000))))

    def messages(self) -> Iterator[tuple[bytes, list[bytes], str]]:
        """Peer and frames of every message that has arrived, read as they are asked for, and the
        role of the key that it came with; the learner's, who may say all, where there are no keys.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                if self._guard is None:
                    peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                    yield peer, frames, LEARNER
                else:
                    whole = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    role = self._guard.role(whole[-1].get("User-Id"))
                    yield whole[0].bytes, [frame.bytes for frame in whole[1:]], role

    def send(self, peer: bytes, payload: bytes) -> str:
        """Send to a peer; return why it cannot be reached, or ''."""
        try:
            self._socket.send_multipart((peer, payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return str(error)
        return ""

    def close(self) -> None:
        """Send what is left, for a second at most, and remove the socket's file."""
        if self._guard is not None:
            self._guard.close()
        self._socket.close(linger=1000)
        self._context.term()
        scheme, _, path = self._address.endpoint.partition("://")
        if scheme == "ipc":  # ZeroMQ leaves it
            Path(path).unlink(missing_ok=True)

    def _bind(self, config: Config) -> None:
        dead_ms = max(1, int(config.replay.dead_after_s * 1000))
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._socket.set(zmq.TCP_MAXRT, dead_ms)
        if not config.replay.endpoint:
            make_socket_dir(config.run_dir)
        if keys := self._address.keys:
            self._guard = keys.make().guard(self._context, self._socket)
        else:  # libzmq 4.3.5 aborts where an encrypted stream that it heartbeats breaks
            self._socket.set(zmq.HEARTBEAT_IVL, max(1, dead_ms // 10))
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, dead_ms)
        self._socket.bind(self._address.endpoint)


class Kept(msgspec.Struct, frozen=True):
    """A learner's question that was answered with Wait, and when."""

    request: wire.Decided
    told: wire.Wait
    at_s: float


class Said(msgspec.Struct, frozen=True):
    """The last word of a connection: its time, and the actor that it spoke as."""

    at_s: float
    actor_id: str


class Connections:
    """The actors, learner and launchers connected to replay; times given, in monotonic seconds.

    `actors`: those that speak as actors; `kept`: the questions that wait for an answer; `lost`:
    those found dead, in order, whose loss is not on record yet.
    """

    def __init__(self, config: Config, router: Router, learning: bool = False) -> None:
        """`learning`: a learner has resumed before replay was started again."""
        self.actors: dict[Peer, Said] = {}
        self.kept: dict[Peer, Kept] = {}
        self.lost: dict[Peer, None] = {}
        self._router = router
        self._unsent: list[tuple[Peer, wire.Reply]] = []  # until what they promise is durable
        self._parting: set[Peer] = set()
        self._refused = self._unroutable = 0
        self._dead_after_s = config.replay.dead_after_s
        self._drain_s = config.actors.drain_deadline_s + GRACE_S
        self._step_s = config.learner.saving_s(weights_bytes(config.model.path))
        self._learning = learning
        self._spoken_s = float("-inf")
        self._stopped_s = float("inf")

    def gauges(self) -> dict[str, float]:
        """Return counts of messages refused and of replies that found nobody, as `replay/…`."""
        return {
            "replay/refused_messages": float(self._refused),
            "replay/unroutable_replies": float(self._unroutable),
        }

    def heard(self, peer: Peer, request: wire.Decided, now_s: float) -> None:
        """Note that `peer` sent `request`; a new question replaces the one kept for it."""
        self._spoken_s = now_s
        self.kept.pop(peer, None)
        if isinstance(request, wire.Goodbye):
            self.actors.pop(peer, None)
        elif isinstance(request, wire.FromActor):
            self.actors[peer] = Said(now_s, request.actor_id)
        elif isinstance(request, wire.Resume | wire.Finish):
            self._learning = isinstance(request, wire.Resume)

    def answer(
        self, peer: Peer, request: wire.Decided | None, reply: wire.Reply, now_s: float
    ) -> None:
        """Send what promises nothing at once, and the rest with the next `flush`.

        A Wait is kept with its `request`, and told again only when it is news.
        """
        if request and isinstance(reply, wire.Wait):
            kept = self.kept.get(peer)
            if kept and kept.told.oldest == reply.oldest and now_s - kept.at_s < WAIT_AGAIN_S:
                return
            self.kept[peer] = Kept(request, reply, now_s)
        else:
            self.kept.pop(peer, None)
        if isinstance(reply, wire.Refused):
            self._note_refusal(reply.cause)
        if isinstance(reply, _PROMISES_NOTHING):
            self.send(peer, reply)
        else:
            self._unsent.append((peer, reply))

    def flush(self) -> None:
        """Send every reply held back so far: what they promise is durable."""
        unsent, self._unsent = self._unsent, []
        for peer, reply in unsent:
            self.send(peer, reply)

    def refuse(self, peer: Peer, error: wire.CodecError) -> None:
        """Answer a message that cannot be read; one changed on the way is as good as lost."""
        self._note_refusal(str(error))
        lost = isinstance(error, wire.Garbled)
        self.send(peer, wire.Unknown() if lost else wire.Refused(str(error)))

    def send(self, peer: Peer, reply: wire.Reply) -> None:
        """Send now; a peer that cannot be reached is lost."""
        if not isinstance(peer, bytes) or peer == SELF or peer in self._parting:
            return
        if isinstance(reply, wire.Status | wire.Batch):
            reply = msgspec.structs.replace(reply, gauges=reply.gauges | self.gauges())
        if cause := self._router.send(peer, self._encoded(reply)):
            self._unroutable += 1
            self.kept.pop(peer, None)
            if peer not in self.lost:  # once for all that it had coming
                self.lost[peer] = None
                logger.warning("%s could not be sent: %s", type(reply).__name__, cause)

    def _encoded(self, reply: wire.Reply) -> bytes:
        """Encode a reply; where none can be made of it, the refusal that says why."""
        if isinstance(reply, wire.Alive):
            return _ALIVE
        try:
            return encode(reply)
        except wire.CodecError as error:
            refused = wire.Refused(f"the answer cannot be sent: {error}")
            self._note_refusal(refused.cause)
            return encode(refused)

    def unanswered(self, others: Iterable[Peer]) -> set[Peer]:
        """Return those of `others` and of the peers owed a reply that are no actors."""
        asking = {*others, *self.kept, *(peer for peer, _ in self._unsent)}
        return asking - self.actors.keys()

    def probe(self, actor_id: str | None = None) -> None:
        """Speak to every actor, or to those of this name: a dead connection is found by it."""
        for peer in [p for p, said in self.actors.items() if actor_id in (None, said.actor_id)]:
            self.send(peer, wire.Alive())

    def silent(self, now_s: float) -> list[Peer]:
        """Return the actors not heard for `replay.dead_after_s`."""
        return [p for p, said in self.actors.items() if now_s - said.at_s > self._dead_after_s]

    @contextlib.contextmanager
    def parting(self, peer: Peer) -> Iterator[None]:
        """Send nothing to `peer` meanwhile: it has gone."""
        self._parting.add(peer)
        yield
        self._parting.remove(peer)

    def forget(self, peer: Peer) -> bool:
        """Count `peer` among the actors no more; return True where it was one."""
        return self.actors.pop(peer, None) is not None

    def stopping(self, now_s: float) -> None:
        """Note that the run is over: from here on the server lingers."""
        self._stopped_s = min(self._stopped_s, now_s)

    def may_leave(self, signalled: bool, now_s: float, awaited: bool = False) -> bool:
        """True where all have left, or have had their time; `awaited`: an actor may come back.

        A learner that has not finished is given its step's deadline; once a signal says that the
        rest is gone (`signalled`), only actors that are here are waited for.
        """
        learning = self._learning and not signalled
        limit_s = self._drain_s + (self._step_s if learning else 0.0)
        quiet = signalled or (now_s - self._spoken_s > QUIET_S and not awaited)
        gone = not self.actors and not learning and quiet
        return now_s >= self._stopped_s and (gone or now_s - self._stopped_s > limit_s)

    def _note_refusal(self, cause: str) -> None:
        self._refused += 1
        logger.warning("refused a message: %s", cause)

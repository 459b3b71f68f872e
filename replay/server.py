"""The socket loop of replay: receive, decide, write, answer. One thread.

Consumes requests of actors, learner and launcher on one ROUTER; produces log records, then replies:
everything that arrived together becomes durable together, and only then is any of it answered.
Waits for the socket, at most TICK_S; a message, a signal or the tick unblocks it. A question that
was answered with Wait is kept and put to the ledger again whenever something went on record.

While the log has no room, only what promises nothing is answered: actors hear that replay lives,
the console how the run stands, who else asks is told to wait; `replay.disk_deadline_s` ends it.
"""

import contextlib
import errno
import logging
import time
from pathlib import Path

import msgspec
import zmq

from configs.keys import Guard, keys_of
from configs.load import dump, replay_endpoint
from configs.process import make_socket_dir
from configs.schema import Config
from replay import protocol
from replay.codec import MAX_REQUEST_BYTES, decode_request, encode
from replay.events import Event, Outcome, Peer, PeerLost, Tick
from replay.ledger import Ledger
from replay.log import EventLog, LogFull
from replay.peers import Peers
from replay.room import Room
from replay.run_protocol import Describe, Described, Observe, Shutdown, Status

TICK_S = 0.1
_BURST = 200  # messages between two ticks
_MOST_HELD = 10_000  # messages, while the log is full
_PROMISES_NOTHING = (*(protocol.Alive, Status, protocol.Refused, protocol.Unknown, protocol.Wait),)
_WITHOUT_ROOM = (protocol.Heartbeat, Observe, Describe)  # what is answered while the log is full
_SELF = b""  # the peer of our own events; no routing id is empty

logger = logging.getLogger(__name__)


class ReplayServer:
    """Serves one run; bound at construction (ReplayError when the endpoint cannot be)."""

    def __init__(self, config: Config, ledger: Ledger, log: EventLog) -> None:
        self._ledger, self._log = ledger, log
        self._peers = Peers(config, learning=bool(ledger.books.learner))
        self._inbox: list[tuple[bytes, protocol.Request]] = []  # read, not yet handled
        self._outbox: list[tuple[Peer, protocol.Reply]] = []  # sent once it is durable
        self._room = Room(config.replay.disk_deadline_s)
        self._changed = False  # something went on record since kept questions were last asked
        self._newcomers = False  # since the last tick
        self._lost: list[Peer] = []
        self._parting: set[Peer] = set()  # nobody answers one that has gone
        self._signals: list[str] = []
        self._signalled = False
        self._refused = self._unroutable = 0
        self._epoch_s = time.time() - time.monotonic()  # a wall clock that never steps back
        self._context = zmq.Context()
        self._guard: Guard | None = None
        self._endpoint, self._described = replay_endpoint(config), Described(dump(config))
        self._socket = self._bind(config)

    def stop(self, cause: str) -> None:
        """Stop the run and drain; a second call ends `run` at once. Safe in a signal handler."""
        self._signals.append(cause)

    def gauges(self) -> dict[str, float]:
        """What the socket met, as `replay/…`."""
        return {
            "replay/refused_messages": float(self._refused),
            "replay/unroutable_replies": float(self._unroutable),
        }

    def run(self) -> None:
        """Serve until the run is over and its peers are gone, or `stop`. Raises LogError."""
        tick_s = time.monotonic()
        try:
            while not self._over():
                self._receive(tick_s + TICK_S - time.monotonic())
                self._settle()
                if time.monotonic() >= tick_s + TICK_S:
                    tick_s = time.monotonic()
                    self._tick(tick_s)
                    self._settle()
        finally:
            self.close()

    def close(self) -> None:
        """Send what is left, for a second at most, and remove the socket's file."""
        if self._guard is not None:
            self._guard.close()
        self._socket.close(linger=1000)
        self._context.term()
        scheme, _, path = self._endpoint.partition("://")
        if scheme == "ipc":  # ZeroMQ leaves it
            Path(path).unlink(missing_ok=True)

    def _receive(self, timeout_s: float) -> None:
        if self._socket.poll(max(0, int(timeout_s * 1000))) and len(self._inbox) < _MOST_HELD:
            self._read(_BURST)
        # A Goodbye that has arrived must be heard before a Hello looks for dead connections.
        self._inbox.sort(key=lambda message: message[0] not in self._peers.actors)
        held: list[tuple[bytes, protocol.Request]] = []
        while self._inbox:
            peer, request = self._inbox.pop(0)
            if self._room.full and not isinstance(request, _WITHOUT_ROOM):
                held.append((peer, request))
            else:
                self._handle(peer, request)
        self._inbox = held
        self._follow_up(self._changed)

    def _read(self, most: int | None = None) -> None:
        count = 0
        with contextlib.suppress(zmq.Again):
            while most is None or count < most:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                count += 1
                try:
                    if len(frames) != 1:
                        raise protocol.Garbled(f"a message of {len(frames)} frames: send one")
                    self._inbox.append((peer, decode_request(frames[0])))
                except protocol.CodecError as error:
                    self._refuse(peer, error)

    def _refuse(self, peer: bytes, error: protocol.CodecError) -> None:
        self._note_refusal(str(error))
        lost = isinstance(error, protocol.Garbled)
        self._send(peer, protocol.Unknown() if lost else protocol.Refused(str(error)))

    def _note_refusal(self, cause: str) -> None:
        self._refused += 1
        logger.warning("refused a message: %s", cause)

    def _handle(self, peer: bytes, request: protocol.Request) -> None:
        if isinstance(request, Describe):
            return self._send(peer, self._described)
        if self._room.full and isinstance(request, protocol.Heartbeat):
            self._peers.heard(peer, request, time.monotonic())  # not for the ledger: it has
            return self._send(peer, protocol.Alive())  # overtaken what it speaks of
        if isinstance(request, protocol.Hello):
            self._newcomers = True
            self._find_dead(request.actor_id)  # else a restarted actor would find its id in use
        try:
            outcome = self._ledger.apply(Event(peer, request), self._now())
        except protocol.CodecError as error:
            return self._refuse(peer, error)
        self._peers.heard(peer, request, time.monotonic())
        self._commit(outcome, request)
        if isinstance(request, protocol.Heartbeat):
            self._send(peer, protocol.Alive())
        self._changed |= bool(outcome.records)
        self._follow_up(changed=False)

    def _commit(self, outcome: Outcome, request: protocol.Decided | None = None) -> None:
        self._log.append(outcome.records)
        for peer, reply in outcome.replies:
            if isinstance(reply, protocol.Refused):
                self._note_refusal(reply.cause)
            if isinstance(reply, Status) and self._room.full:
                reply = msgspec.structs.replace(reply, phase=self._room.cause)
            if request is None or self._peers.answers(peer, request, reply, time.monotonic()):
                if isinstance(reply, _PROMISES_NOTHING):
                    self._send(peer, reply)
                else:
                    self._outbox.append((peer, reply))

    def _settle(self) -> None:
        """Make durable what was decided, then answer. Raises LogError."""
        while True:
            try:
                self._log.sync()
            except LogFull as error:
                return self._hold_on(error)
            if self._room.full:
                self._room.found()
            outbox, self._outbox = self._outbox, []
            for peer, reply in outbox:
                self._send(peer, reply)
            if not self._lost:
                return None
            self._follow_up(changed=False)

    def _hold_on(self, error: LogFull) -> None:
        """There is no room: who asked something is told so, now and then."""
        if self._signals:
            raise error
        if self._room.missing(error, time.monotonic()):
            asking = {peer for peer, _ in [*self._outbox, *self._inbox]} | self._peers.kept.keys()
            for peer in asking - self._peers.actors.keys():
                self._send(peer, protocol.Wait(self._room.cause, oldest=False))

    def _decide(self, peer: Peer, message: protocol.Decided | Tick | PeerLost) -> None:
        request = None if isinstance(message, Tick | PeerLost) else message
        self._commit(self._ledger.apply(Event(peer, message), self._now()), request)

    def _follow_up(self, changed: bool) -> None:
        """Tell the ledger of connections found dead, and ask kept questions again."""
        while (changed or self._lost) and not self._room.full:
            while self._lost:
                self._lose(self._lost.pop())
            changed = self._changed = False
            for peer, kept in list(self._peers.kept.items()):
                self._decide(peer, kept.request)

    def _lose(self, peer: Peer) -> None:
        """Forget a connection; what it had said before it broke, perhaps Goodbye, counts."""
        if peer in self._parting:
            return  # more than one answer found nobody
        self._read()
        said = [message for message in self._inbox if message[0] == peer]
        self._inbox = [message for message in self._inbox if message[0] != peer]
        self._parting.add(peer)
        for sender, request in said:
            self._handle(sender, request)
        self._parting.remove(peer)
        if self._peers.actors.pop(peer, None) is not None:
            self._decide(peer, PeerLost())

    def _find_dead(self, actor_id: str | None = None) -> None:
        """Speak to every actor, or to those of this name."""
        for peer in self._peers.called(actor_id):
            self._send(peer, protocol.Alive())  # unroutable: its process is gone
        self._follow_up(changed=False)

    def _tick(self, now_s: float) -> None:
        if self._room.full:
            return
        if self._signals and not self._signalled:
            self._signalled = True
            self._decide(_SELF, Shutdown(self._signals[0]))
            self._newcomers = True
        if self._newcomers:
            self._newcomers = False
            self._find_dead()
        if silent := self._peers.silent(now_s):
            self._read()  # perhaps it is us who did not listen
            speaking = {message[0] for message in self._inbox}
            self._lost += [peer for peer in silent if peer not in speaking]
        self._decide(_SELF, Tick())
        self._follow_up(changed=True)
        if self._ledger.stop_cause:
            self._peers.stopping(now_s)

    def _over(self) -> bool:
        awaited = bool(self._ledger.books.held)  # actors on record, back or not
        may_leave = self._peers.may_leave(self._signalled, time.monotonic(), awaited)
        return len(self._signals) > 1 or may_leave

    def _send(self, peer: Peer, reply: protocol.Reply) -> None:
        if not isinstance(peer, bytes) or peer == _SELF or peer in self._parting:
            return
        if isinstance(reply, Status | protocol.Batch):
            reply = msgspec.structs.replace(reply, gauges=reply.gauges | self.gauges())
        try:
            self._socket.send_multipart((peer, encode(reply)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            self._unroutable += 1
            self._peers.kept.pop(peer, None)
            if peer not in self._lost:  # once for all that it had coming
                self._lost.append(peer)
                logger.warning("%s could not be sent: %s", type(reply).__name__, error)

    def _now(self) -> float:
        return self._epoch_s + time.monotonic()

    def _bind(self, config: Config) -> "zmq.Socket[bytes]":
        endpoint, dead_ms = self._endpoint, int(config.replay.dead_after_s * 1000)
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.set(zmq.TCP_MAXRT, max(1, dead_ms))
        try:
            if not config.replay.endpoint:
                make_socket_dir(config.run_dir)
            if keys := keys_of(config, endpoint):
                self._guard = keys.make().guard(self._context, socket)
            else:  # libzmq 4.3.5 aborts where an encrypted stream that it heartbeats breaks
                socket.set(zmq.HEARTBEAT_IVL, max(1, dead_ms // 10))
                socket.set(zmq.HEARTBEAT_TIMEOUT, max(1, dead_ms))
            socket.bind(endpoint)
        except (zmq.ZMQError, OSError) as error:
            if self._guard is not None:
                self._guard.close()
            self._context.destroy(linger=0)
            raise protocol.ReplayError(
                f"replay.endpoint = {endpoint!r} cannot be bound ({error}): "
                "end the process that uses it, or choose another"
            ) from error
        logger.info("listening on %s", endpoint)
        return socket

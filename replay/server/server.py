"""The socket loop of replay: receive, decide, write, answer. One thread.

Consumes requests of actors, learner and launcher on one ROUTER; produces log records, then replies.
Waits for the socket, at most TICK_S; a message, a signal or the tick unblocks it.

A request is read into the disk's inbox, put to the ledger, and its reply pushed. Everything that
was decided together becomes durable together, and only then are its replies sent. A question
answered with Wait is kept and put to the ledger again whenever something went on record.

While the log has no room, only what promises nothing is answered: actors hear that replay lives,
the console how the run stands, who else asks is told to wait; `replay.disk_deadline_s` ends it.
Where more waits than is handled between two answers, actors hear at once that replay lives.
"""

import itertools
import time

import msgspec

import replay.protocol as wire
from configs.load import dump
from configs.schema import Config
from replay.ledger.events import Event, Outcome, Peer, PeerLost, Tick
from replay.ledger.ledger import Ledger
from replay.log.event_log import EventLog, LogFull
from replay.server.connections import SELF, Connections
from replay.server.disk import Disk
from replay.server.keeper import Keeper
from replay.server.reception import Reception, request_of

TICK_S = 0.1
_BURST = 200  # messages between two ticks


class ReplayServer:
    """Serves one run; bound at construction (ReplayError when the endpoint cannot be)."""

    def __init__(
        self, config: Config, ledger: Ledger, log: EventLog, reception: Reception | None = None
    ) -> None:
        """`reception`: the socket, and who has spoken to it so far."""
        self._ledger, self._log = ledger, log
        reception = reception or Reception(config)
        self._router = reception.open()
        learning = bool(ledger.state.learner)
        self._connections = Connections(config, self._router, learning)
        self._disk = Disk(config.replay.disk_deadline_s)
        for peer, request, size in reception.held:
            self._disk.receive(peer, request, size)
        self._keeper = Keeper(ledger, log, config.replay.keep)
        self._described = wire.Described(dump(config))
        self._changed = False  # something went on record since kept questions were last asked
        self._joined = False  # an actor said Hello since the last tick
        self._signals: list[str] = []
        self._signalled = False
        # A clock that never steps back, not even from one process to the next: a group that was
        # opened in the future would never be past its deadline.
        self._epoch_s = max(time.time(), ledger.latest) - time.monotonic()

    def stop(self, cause: str) -> None:
        """Stop the run and drain; a second call ends `run` at once. Safe in a signal handler."""
        self._signals.append(cause)

    def gauges(self) -> dict[str, float]:
        """Return counts of what the socket met, as `replay/…`."""
        return self._connections.gauges()

    def run(self) -> None:
        """Serve until the run is over and its peers are gone, or `stop`. Raises LogError."""
        tick_s = time.monotonic()
        try:
            while not self._over():
                self._serve(tick_s + TICK_S - time.monotonic())
                self._settle()
                if time.monotonic() >= tick_s + TICK_S:
                    tick_s = time.monotonic()
                    self._tick(tick_s)
                    self._settle()
            self._keeper.close()
        finally:
            self.close()

    def close(self) -> None:
        """Send what is left, for a second at most, and remove the socket's file."""
        self._router.close()

    def _serve(self, timeout_s: float) -> None:
        if self._router.poll(0.0 if self._disk.more else timeout_s):
            self._read(_BURST)
        # A Goodbye that has arrived must be heard before a Hello looks for dead connections.
        for peer, request in self._disk.requests(first=self._connections.actors):
            self._handle(peer, request)
            self._record_losses()

    def _read(self, most: int | None = None) -> None:
        for peer, frames, role in itertools.islice(self._router.messages(), most):
            try:
                request = request_of(frames, role)
            except wire.CodecError as error:
                self._connections.refuse(peer, error)
                continue
            if isinstance(request, wire.Heartbeat) and self._disk.behind:
                self._handle(peer, request)  # ahead of all that waits
            else:
                self._disk.receive(peer, request, len(frames[0]))

    def _handle(self, peer: Peer, request: wire.Request) -> None:
        heartbeat = isinstance(request, wire.Heartbeat)
        if isinstance(request, wire.Describe):
            self._connections.send(peer, self._described)
        elif heartbeat and self._disk.behind:
            # Not for the ledger: it has overtaken what it speaks of.
            self._connections.heard(peer, request, time.monotonic())
        else:
            self._put(peer, request)
        if heartbeat:
            self._connections.send(peer, wire.Alive())

    def _put(self, peer: Peer, request: wire.Decided) -> None:
        """Put a request to the ledger, and its replies on their way."""
        if isinstance(request, wire.Hello):
            self._joined = True
            self._connections.probe(request.actor_id)  # a restarted actor's id may be in use
            self._record_losses()
        try:
            outcome = self._ledger.apply(Event(peer, request), self._now())
        except wire.CodecError as error:
            self._connections.refuse(peer, error)
            return
        self._connections.heard(peer, request, time.monotonic())
        self._commit(outcome, request)

    def _decide(self, peer: Peer, message: wire.Decided | Tick | PeerLost) -> None:
        request = None if isinstance(message, Tick | PeerLost) else message
        self._commit(self._ledger.apply(Event(peer, message), self._now()), request)

    def _commit(self, outcome: Outcome, request: wire.Decided | None) -> None:
        self._log.append(outcome.records)
        self._changed |= bool(outcome.records)
        for peer, reply in outcome.replies:
            if isinstance(reply, wire.Status) and self._disk.full:
                reply = msgspec.structs.replace(reply, phase=self._disk.cause)
            self._connections.answer(peer, request, reply, time.monotonic())

    def _settle(self) -> None:
        """Decide what follows, make it all durable, then answer. Raises LogError."""
        answered = False
        while not answered:
            self._follow_up()
            try:
                self._log.sync()
            except LogFull as error:
                self._hold_on(error)
                return
            self._disk.found()
            self._keeper.look()
            self._connections.flush()
            answered = not self._connections.lost

    def _follow_up(self) -> None:
        """Put losses on record and, where anything has changed, kept questions again."""
        while (self._changed or self._connections.lost) and not self._disk.full:
            self._record_losses()
            for peer, kept in list(self._connections.kept.items()):
                self._decide(peer, kept.request)
            self._changed = False

    def _record_losses(self) -> None:
        """Put every dead connection on record, after what it had said before, perhaps Goodbye."""
        while self._connections.lost and not self._disk.full:
            peer, _ = self._connections.lost.popitem()
            self._read()
            with self._connections.parting(peer):
                for request in self._disk.requests_of(peer):
                    self._handle(peer, request)
            if self._connections.forget(peer):
                self._decide(peer, PeerLost())
            self._changed = True  # whoever waits may wait for it no more

    def _hold_on(self, error: LogFull) -> None:
        """Tell who asked something, now and then, that there is no room."""
        if self._signals:
            raise error
        if self._disk.missing(error, time.monotonic()):
            for peer in self._connections.unanswered(self._disk.waiting()):
                self._connections.send(peer, wire.Wait(self._disk.cause, oldest=False))

    def _tick(self, now_s: float) -> None:
        if self._disk.full:
            return
        if self._signals and not self._signalled:
            self._signalled = True
            self._decide(SELF, wire.Shutdown(self._signals[0]))
            self._joined = True
        if self._joined:
            self._joined = False
            self._connections.probe()
            self._record_losses()
        if silent := self._connections.silent(now_s):
            self._read()  # perhaps it is us who did not listen
            speaking = self._disk.waiting()
            self._connections.lost |= {peer: None for peer in silent if peer not in speaking}
        self._decide(SELF, Tick())
        self._changed = True
        self._follow_up()
        if self._ledger.stop_cause:
            self._connections.stopping(now_s)

    def _over(self) -> bool:
        awaited = bool(self._ledger.state.held)  # actors on record, back or not
        may_leave = self._connections.may_leave(self._signalled, time.monotonic(), awaited)
        return len(self._signals) > 1 or may_leave

    def _now(self) -> float:
        return self._epoch_s + time.monotonic()

"""The state machine of replay: `apply(event, now)` decides, writes facts and says what to reply.

Consumes the requests of actors, learner and launcher, and what the server notices (`Tick`,
`PeerLost`); produces records to append and replies to send, in that order. It never blocks: a
learner that must wait is told whom it waits for (`Wait`), and the server asks again; leases are
pushed as soon as any event allows one. Pure code: no socket, clock or file. Durable state changes
only through `Books.evolve`, so a fold of the log restores it; who is connected (`Roster`) is live,
rebuilt by each actor's Hello and Ready.
"""

from collections.abc import Iterable, Sequence

from configs.schema import ReplayConfig
from replay.actor_desk import ActorDesk, Replies, Summarise
from replay.books import Books
from replay.endings import drop_expired, end_run, finish_evaluations, stop_without_questions
from replay.events import Event, Outcome, Peer, PeerLost, Tick
from replay.journal import Journal
from replay.learner_desk import LearnerDesk
from replay.leasing import Lessor
from replay.protocol import (
    Committed,
    Decided,
    Deliver,
    Done,
    Evaluate,
    Finish,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseFailed,
    LogError,
    Ready,
    Report,
    Resume,
    Sample,
    Stop,
    Wait,
)
from replay.questions import Questions
from replay.records import ActorJoined, Delivered, Record, Superseded
from replay.roster import Actor, Roster
from replay.run_protocol import Observe, Shutdown, Status
from replay.trajectory import Question, Sampling
from replay.waits import describe_phase

_OWN = (Deliver, Heartbeat, Ready, Hello)  # messages that may change the sender's room or weights,
_OF_ONE_ACTOR = (ActorJoined, Delivered, Superseded)  # and facts that leave the others'


class Ledger:
    """All that replay knows and decides."""

    def __init__(
        self,
        config: ReplayConfig,
        questions: Questions,
        eval_questions: Sequence[Question],
        sampling: Sampling,
        summarise: Summarise,
        total_steps: int | None = None,
    ) -> None:
        """`sampling` is what train leases carry (`actors.temperature`, the run's seed).

        No group is opened beyond what `total_steps` steps will train; None: without end.

        `summarise(payload)` decodes what was delivered; its CodecError leaves `apply` before
        anything has changed.
        """
        self.books = Books(config, questions, eval_questions)
        self._journal = Journal(self.books)
        self._roster = Roster()
        self._actors = ActorDesk(self._journal, self._roster, summarise)
        self._learner = LearnerDesk(self._journal, self._roster)
        self._lessor = Lessor(self._journal, self._roster, sampling, total_steps)
        self._serving_since: float | None = None
        self._learner_waits_for = ""

    def restore(self, records: Iterable[Record]) -> None:
        """Fold a log. Raises LogError where it contradicts the questions or the configuration, or
        lacks a payload that may be asked for.
        """
        for record in records:
            try:
                self.books.evolve(record)
            except LookupError as error:
                raise LogError(
                    f"event log: a {type(record).__name__} record contradicts those before it "
                    f"({error!r}): it was written under another configuration: put back the run's "
                    "own"
                ) from error
        self._refuse_compacted()

    def apply(self, event: Event, now: float) -> Outcome:
        """Decide about one event at `now`: seconds since the epoch, never decreasing.

        Append the outcome's records, then send its replies. Direct replies go to the event's peer;
        `Leases` and `Stop` to the peer of each actor's latest accepted Hello.
        """
        self._journal.now = now
        if self._serving_since is None:
            self._serving_since = now
        running = not self.books.stop_cause
        replies = self._decide(event.peer, event.message)
        finish_evaluations(self._journal)
        stop_without_questions(self._journal)
        replies += self._lessor.grant(self._affected(event.message))
        if running and self.books.stop_cause:
            replies += [(actor.peer, Stop(self.books.stop_cause)) for actor in self._roster]
        return Outcome(self._journal.take(), tuple(replies))

    def gauges(self) -> dict[str, float]:
        """Replay's own numbers, by metric name."""
        return self.books.gauges()

    @property
    def stop_cause(self) -> str:
        """Why the run is over; empty while it runs."""
        return self.books.stop_cause

    def _affected(self, message: Decided | Tick | PeerLost) -> list[Actor] | None:
        """The actor that alone may be leased something after this message; None: any may."""
        if isinstance(message, Sample | Observe) and self._journal.wrote_only(()):
            return []  # a question kept for its answer is put again after every burst
        if not isinstance(message, _OWN) or not self._journal.wrote_only(_OF_ONE_ACTOR):
            return None
        actor = self._roster.get(message.actor_id)
        return [] if actor is None else [actor]

    def _refuse_compacted(self) -> None:
        for place in (self.books.opened, self.books.ready, self.books.sampled):
            for group in place.values():
                if not all(group.payloads.values()):
                    raise LogError(
                        f"event log: the payloads of group {group.group_id} were compacted away, "
                        "but no step that trained it is committed: put back the log from before"
                    )

    def _decide(self, peer: Peer, message: Decided | Tick | PeerLost) -> Replies:
        match message:
            case Tick():
                self._tick()
                return []
            case PeerLost():
                self._actors.lost(peer, message.cause)
                return []
            case Hello():
                return self._actors.hello(peer, message)
            case Ready():
                return self._actors.ready(peer, message)
            case Deliver():
                return self._actors.deliver(peer, message)
            case LeaseFailed():
                return self._actors.lease_failed(peer, message)
            case Heartbeat():
                return self._actors.heartbeat(peer, message)
            case Goodbye():
                return self._actors.goodbye(peer, message)
            case Observe():
                return [(peer, self._status(message))]
            case Shutdown():
                end_run(self._journal, message.cause)
                return [(peer, Done())]
            case _:
                return self._decide_for_learner(peer, message)

    def _decide_for_learner(
        self, peer: Peer, message: Resume | Sample | Committed | Evaluate | Report | Finish
    ) -> Replies:
        match message:
            case Resume():
                return [(peer, self._learner.resume(message))]
            case Sample():
                reply = self._learner.sample(message)
                self._learner_waits_for = reply.reason if isinstance(reply, Wait) else ""
                return [(peer, reply)]
            case Committed():
                return [(peer, self._learner.committed(message))]
            case Evaluate():
                return [(peer, self._learner.evaluate(message))]
            case Report():
                return [(peer, self._learner.report(message))]
            case Finish():
                return [(peer, self._learner.finish(message))]

    def _tick(self) -> None:
        if self.books.catching_up:
            self._serving_since = self._journal.now  # no group grows old while none is worked on
        since = self._journal.now if self._serving_since is None else self._serving_since
        drop_expired(self._journal, since)
        if self._journal.now - since >= self.books.config.dead_after_s:
            self._actors.dismiss_absent()

    def _status(self, message: Observe) -> Status:
        books = self.books
        return Status(
            steps=tuple(books.reports[message.after_step :]),
            evaluations=tuple(books.results[message.after_evaluation :]),
            gauges=books.gauges(),
            fleet=self._roster.fleet(),
            phase=describe_phase(books, self._learner_waits_for),
            stop_cause=books.stop_cause,
        )

"""The state machine of replay: `apply(event, now)` decides, writes facts and gives the replies.

Pure code: no socket, clock or file. It never blocks: a learner that must wait is told whom it waits
for (`Wait`), and the server asks again; leases are pushed as soon as any event allows one. Durable
state changes only through `LedgerState.evolve`, so a fold of the log restores it; who is connected
(`Roster`) is live, rebuilt by each actor's Hello and Ready.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import replay.protocol as wire
from configs.schema import ReplayConfig
from replay.ledger.actors import ActorHandler, Replies, Summarise
from replay.ledger.bounds import why_refused
from replay.ledger.describe import describe_phase
from replay.ledger.events import Event, Outcome, Peer, PeerLost, Tick
from replay.ledger.image import decoded, image_of, lacking, take_in
from replay.ledger.learner import LearnerHandler
from replay.ledger.leasing import Lessor
from replay.ledger.lifecycle import (
    drop_expired,
    end_run,
    finish_evaluations,
    stop_without_questions,
)
from replay.ledger.roster import Actor, Roster
from replay.ledger.state import Journal, LedgerState
from replay.log.records import ActorJoined, Delivered, Record, Superseded
from replay.questions import Questions
from replay.trajectory import Question, Sampling

# Messages and facts that change the capacity or the weights of no actor but the sender.
_ASKING = (wire.Sample, wire.SamplePart, wire.Observe)
_OWN = (wire.Deliver, wire.Heartbeat, wire.Ready, wire.Hello)
_OF_ONE_ACTOR = (ActorJoined, Delivered, Superseded)


# Record numbers → each with its payload.
Fetch = Callable[[Collection[int]], Iterable[tuple[int, bytes]]]


class Ledger:
    """The one place where replay decides."""

    def __init__(
        self,
        config: ReplayConfig,
        questions: Questions,
        eval_questions: Sequence[Question],
        sampling: Sampling,
        summarise: Summarise,
        total_steps: int | None = None,
        eval_temperatures: tuple[float, ...] = (0.0, 1.0),
    ) -> None:
        """`sampling` is carried by train leases (`actors.temperature`, the run's seed);
        `eval_temperatures` by those of an evaluation's question, by sibling. `latest`: the time of
        the newest record or event, which no event may precede.

        No group is opened beyond what `total_steps` steps will train; None: without end. The
        CodecError of `summarise(payload)` leaves `apply` before anything has changed.
        """
        self.state = LedgerState(config, questions, eval_questions, eval_temperatures)
        self._journal = Journal(self.state)
        self._roster = Roster()
        self._actors = ActorHandler(self._journal, self._roster, summarise)
        self._learner = LearnerHandler(self._journal, self._roster)
        self._lessor = Lessor(self._journal, self._roster, sampling, total_steps)
        self._serving_since: float | None = None
        self._learner_waits_for = ""
        self.latest = 0.0  # when the newest record that was folded became true

    @property
    def image(self) -> bytes:
        """All that is durable here, as `begin` takes it."""
        return image_of(self.state, self.latest)

    def begin(self, image: bytes) -> None:
        """Take the place of what folded all records up to this image. Raises BadImage, LogError."""
        found = decoded(image)
        take_in(self.state, found)
        self.latest = found.latest

    def restore(self, records: Iterable[Record], fetch: Fetch | None = None) -> None:
        """Fold a log, or what follows the image that this ledger began with: then `fetch` returns
        the payloads that are asked of it. Raises LogError where the log contradicts the questions
        or the configuration, or lacks a payload that may be asked for.
        """
        self._fold(records)
        if fetch and (wanted := lacking(self.state)):
            for number, payload in fetch(wanted):
                group, sibling = wanted[number]
                group.payloads[sibling] = payload
        self._refuse_compacted()

    def _fold(self, records: Iterable[Record]) -> None:
        for record in records:
            self.latest = max(self.latest, record.now)
            try:
                self.state.evolve(record)
            except LookupError as error:
                raise wire.LogError(
                    f"event log: a {type(record).__name__} record contradicts those before it "
                    f"({error!r}): it was written under another configuration: put back the run's "
                    "own"
                ) from error

    def apply(self, event: Event, now: float) -> Outcome:
        """Decide about one event at `now`: seconds since the epoch, never decreasing.

        Append the outcome's records, then send its replies. Direct replies go to the event's peer;
        `Leases` and `Stop` to the peer of each actor's latest accepted Hello.
        """
        if cause := why_refused(self.state, event.message):
            return Outcome((), ((event.peer, wire.Refused(cause)),))
        self._journal.now = self.latest = now
        if self._serving_since is None:
            self._serving_since = now
        running = not self.state.stop_cause
        replies = self._decide(event.peer, event.message)
        finish_evaluations(self._journal)
        stop_without_questions(self._journal)
        replies += self._lessor.grant(self._affected(event.message))
        if running and self.state.stop_cause:
            replies += [(actor.peer, wire.Stop(self.state.stop_cause)) for actor in self._roster]
        return Outcome(self._journal.take(), tuple(replies))

    def gauges(self) -> dict[str, float]:
        """Return replay's own numbers, by metric name."""
        return self.state.gauges()

    @property
    def stop_cause(self) -> str:
        """The cause that ended the run; empty while it runs."""
        return self.state.stop_cause

    def _affected(self, message: wire.Decided | Tick | PeerLost) -> list[Actor] | None:
        """Return the only actors that may be leased something after this message; None: all may."""
        if isinstance(message, _ASKING) and self._journal.wrote_only(()):
            return []  # a question kept for its answer is put again after every burst
        if not isinstance(message, _OWN) or not self._journal.wrote_only(_OF_ONE_ACTOR):
            return None
        actor = self._roster.get(message.actor_id)
        return [] if actor is None else [actor]

    def _refuse_compacted(self) -> None:
        for place in (self.state.opened, self.state.ready, self.state.sampled):
            for group in place.values():
                if not all(group.payloads.values()):
                    raise wire.LogError(
                        f"event log: the payloads of group {group.group_id} were compacted away, "
                        "but no step that trained it is committed: put back the log from before"
                    )

    def _decide(self, peer: Peer, message: wire.Decided | Tick | PeerLost) -> Replies:
        match message:
            case Tick():
                self._tick()
                return []
            case PeerLost():
                self._actors.lost(peer, message.cause)
                return []
            case wire.Hello():
                return self._actors.hello(peer, message)
            case wire.Ready():
                return self._actors.ready(peer, message)
            case wire.Deliver():
                return self._actors.deliver(peer, message)
            case wire.LeaseFailed():
                return self._actors.lease_failed(peer, message)
            case wire.Heartbeat():
                return self._actors.heartbeat(peer, message)
            case wire.Goodbye():
                return self._actors.goodbye(peer, message)
            case wire.Observe():
                return [(peer, self._status(message))]
            case wire.Shutdown():
                end_run(self._journal, message.cause)
                return [(peer, wire.Done())]
            case _:
                return self._decide_for_learner(peer, message)

    def _decide_for_learner(self, peer: Peer, message: wire.FromLearner) -> Replies:
        reply = self._learner.answer(message)
        if isinstance(message, wire.Sample):
            self._learner_waits_for = reply.reason if isinstance(reply, wire.Wait) else ""
        return [(peer, reply)]

    def _tick(self) -> None:
        if self.state.catching_up:
            self._serving_since = self._journal.now  # no group grows old while none is worked on
        since = self._journal.now if self._serving_since is None else self._serving_since
        drop_expired(self._journal, since)
        if self._journal.now - since >= self.state.config.dead_after_s:
            self._actors.dismiss_absent()

    def _status(self, message: wire.Observe) -> wire.Status:
        state = self.state
        evaluations = state.results.after(message.after_evaluation)
        return wire.Status(
            steps=state.reports.after(message.after_step),
            evaluations=evaluations,
            shown=tuple(self._actors.evaluated) if evaluations else (),
            reported=state.reports.count,
            evaluated=state.results.count,
            gauges=state.gauges(),
            fleet=self._roster.fleet(),
            phase=describe_phase(state, self._learner_waits_for),
            stop_cause=state.stop_cause,
        )

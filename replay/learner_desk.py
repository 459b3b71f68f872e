"""What replay decides when the learner speaks.

Consumes the learner's messages; writes batches, commits, evaluations and reports, produces one
reply each. A message of any but the latest incarnation is refused, which fences a stopped learner
that wakes up. A sampled step is served in the same composition as often as it is asked for, until
it is committed. Waits for nothing: a batch that cannot be made yet is answered with a `Wait` that
names who is waited for.
"""

import msgspec

from replay import records
from replay.admission import Bounds, Choice, choose_batch
from replay.endings import drop_untrainable, end_run, finish_evaluations, void_after
from replay.groups import Group
from replay.journal import Journal
from replay.protocol import (
    Batch,
    Committed,
    Done,
    EvalProgress,
    Evaluate,
    Finish,
    Refused,
    Report,
    Resume,
    Resumed,
    Sample,
    Stop,
    Wait,
)
from replay.results import StepReport
from replay.roster import Roster
from replay.waits import describe_batch_wait

_ENCODER = msgspec.msgpack.Encoder()


class LearnerDesk:
    """One method per message of the learner."""

    def __init__(self, journal: Journal, roster: Roster) -> None:
        self._journal = journal
        self._books = journal.books
        self._roster = roster
        config = self._books.config
        self._bounds = Bounds(config.groups_per_step, config.max_staleness)

    def resume(self, message: Resume) -> Resumed | Refused | Stop:
        """Take a learner that has completed `step` steps; refuse older incarnations from now on.

        Its own repetition is answered like the first time, as long as it has sampled nothing.
        """
        books, now = self._books, self._journal.now
        repeated = (message.incarnation, message.step) == (books.incarnation, books.served)
        if repeated and message.instance and message.instance == books.learner:
            return Resumed(books.last_sampled - message.step)
        if message.incarnation <= books.incarnation:
            return Refused(
                f"incarnation {message.incarnation} must exceed {books.incarnation}, which has "
                "resumed already"
            )
        if message.step < books.committed:
            return Refused(
                f"step {message.step} lies before step {books.committed}, which is committed: "
                "its batches are gone; start from the newest checkpoint"
            )
        if books.stop_cause:
            return Stop(books.stop_cause)
        drop_untrainable(self._journal, message.step)
        void_after(self._journal, message.step)
        self._journal.write(records.StepsCommitted(now, message.incarnation, message.step))
        fact = records.LearnerResumed(now, message.incarnation, message.step, message.instance)
        self._journal.write(fact)
        return Resumed(books.last_sampled - message.step)

    def sample(self, message: Sample) -> Batch | Wait | Refused | Stop:
        """Serve the batch of step + 1: the recorded one, a new one, or why there is none."""
        books, step = self._books, message.step + 1
        if refused := self._fence(message.incarnation):
            return refused
        if books.stop_cause:
            return Stop(books.stop_cause)
        if step in books.batches and step <= books.served + 1:
            if step > books.served:
                self._journal.write(records.Resampled(self._journal.now, message.incarnation, step))
            return self._batch(step)
        if step != books.last_sampled + 1 or books.serving_again:
            return Refused(f"step {step} is out of order: step {books.served + 1} comes next")
        self._caught_up(message)
        choice = self._choose(message.step)
        if not choice.group_ids:
            now = self._journal.now
            reason = describe_batch_wait(books, self._roster, step, choice.oldest, now)
            return Wait(reason, choice.oldest)
        gauges = self._batch_gauges(message.step, [books.ready[i] for i in choice.group_ids])
        self._journal.write(
            records.Sampled(
                self._journal.now,
                message.incarnation,
                step,
                choice.group_ids,
                tuple(books.unannounced),
                gauges,
            )
        )
        return self._batch(step)

    def committed(self, message: Committed) -> Done | Refused:
        """Forget the payloads of steps ≤ `step`: their training is durable."""
        if refused := self._fence(message.incarnation):
            return refused
        if message.step > self._books.served:
            return Refused(f"step {message.step} was never sampled: {self._books.served} was last")
        if message.step > self._books.committed:
            self._journal.write(
                records.StepsCommitted(self._journal.now, message.incarnation, message.step)
            )
        return Done()

    def evaluate(self, message: Evaluate) -> EvalProgress | Refused | Stop:
        """Open the evaluation of this step, once; say how far it is."""
        if refused := self._fence(message.incarnation):
            return refused
        if self._books.stop_cause:
            return Stop(self._books.stop_cause)
        self._caught_up(message)
        if message.step not in self._books.evaluations:
            self._journal.write(records.EvaluationOpened(self._journal.now, message.step))
            finish_evaluations(self._journal)
        evaluation = self._books.evaluations[message.step]
        return EvalProgress(*evaluation.progress, evaluation.result)

    def report(self, message: Report) -> Done | Refused:
        """Record the learner's numbers, once."""
        if refused := self._fence(message.incarnation):
            return refused
        if not self._is_last_report(StepReport(message.step, message.gauges)):
            fact = records.Reported(
                self._journal.now, message.incarnation, message.step, message.gauges
            )
            self._journal.write(fact)
        return Done()

    def finish(self, message: Finish) -> Done | Refused:
        """The run is over."""
        if refused := self._fence(message.incarnation):
            return refused
        end_run(self._journal, message.cause)
        return Done()

    def _is_last_report(self, report: StepReport) -> bool:
        # Compared as bytes: a number that is not one differs from itself.
        return [_ENCODER.encode(r) for r in self._books.reports[-1:]] == [_ENCODER.encode(report)]

    def _fence(self, incarnation: int) -> Refused | None:
        current = self._books.incarnation
        if incarnation < current:
            return Refused(f"incarnation {incarnation} is over: {current} has resumed")
        if incarnation > current or current == 0:
            return Refused(f"incarnation {incarnation} is not known here: say Resume first")
        return None

    def _caught_up(self, message: Sample | Evaluate) -> None:
        """A learner that asks for something new serves weights of its own: leasing may go on."""
        books = self._books
        if books.catching_up and not books.serving_again:
            fact = records.CaughtUp(self._journal.now, message.incarnation, books.served)
            self._journal.write(fact)

    def _choose(self, step: int) -> Choice:
        ready = [(g.version, g.group_id) for g in self._books.ready.values()]
        unfinished = [(g.version, g.group_id) for g in self._books.opened.values()]
        return choose_batch(ready, unfinished, step, self._bounds)

    def _batch(self, step: int) -> Batch:
        fact = self._books.batches[step]
        groups = [self._books.sampled[group_id] for group_id in fact.group_ids]
        found = [self._books.evaluations.get(step) for step in fact.evaluations]
        return Batch(
            step=step,
            group_ids=fact.group_ids,
            versions=tuple(group.version for group in groups),
            groups=tuple(tuple(g.payloads[i] for i in range(g.size)) for g in groups),
            gauges=fact.gauges,
            fleet=self._roster.fleet(),
            evaluations=tuple(e.result for e in found if e is not None and e.result is not None),
        )

    def _batch_gauges(self, step: int, groups: list[Group]) -> dict[str, float]:
        trained = [summary for group in groups for summary in group.summaries.values()]
        return self._books.gauges() | {
            "replay/staleness": float(step - min(group.oldest_version for group in groups)),
            "replay/trained_searches_per_rollout": sum(s.searches for s in trained) / len(trained),
        }

"""Replay's decisions about the learner: each of its messages becomes facts and one reply.

A message of any but the latest incarnation is refused, which fences a stopped learner that wakes
up. A sampled step is served in the same composition as often as it is asked for, until it is
committed. A batch that cannot be made yet is answered with a `Wait` that names who is waited for.
"""

import msgspec

import replay.protocol as wire
from replay.ledger.admission import Bounds, Choice, choose_batch
from replay.ledger.describe import describe_batch_wait
from replay.ledger.groups import Group
from replay.ledger.lifecycle import drop_untrainable, end_run, finish_evaluations, void_after
from replay.ledger.roster import Roster
from replay.ledger.state import Journal
from replay.log import records
from replay.parts import PART_BYTES, cut

_ENCODER = msgspec.msgpack.Encoder()


class LearnerHandler:
    """One method per message of the learner."""

    def __init__(self, journal: Journal, roster: Roster) -> None:
        self._journal = journal
        self._state = journal.state
        self._roster = roster
        config = self._state.config
        self._bounds = Bounds(config.groups_per_step, config.max_staleness)

    def answer(self, message: wire.FromLearner) -> wire.ToLearner:
        """Decide about one message; any but Resume must be of the latest incarnation."""
        if isinstance(message, wire.Resume):
            return self.resume(message)
        if refused := self._fence(message.incarnation):
            return refused
        match message:
            case wire.Sample():
                return self.sample(message)
            case wire.SamplePart():
                return self.sample_part(message)
            case wire.Committed():
                return self.committed(message)
            case wire.Evaluate():
                return self.evaluate(message)
            case wire.Report():
                return self.report(message)
            case wire.Finish():
                return self.finish(message)

    def resume(self, message: wire.Resume) -> wire.Resumed | wire.Refused | wire.Stop:
        """Take a learner that has completed `step` steps; refuse older incarnations from now on.

        Its own repetition is answered like the first time, as long as it has sampled nothing.
        """
        state, now = self._state, self._journal.now
        repeated = (message.incarnation, message.step) == (state.incarnation, state.served)
        if repeated and message.instance and message.instance == state.learner:
            return wire.Resumed(state.last_sampled - message.step)
        if message.incarnation <= state.incarnation:
            return wire.Refused(
                f"incarnation {message.incarnation} must exceed {state.incarnation}, which has "
                "resumed already"
            )
        if message.step < state.committed:
            return wire.Refused(
                f"step {message.step} lies before step {state.committed}, which is committed: "
                "its batches are gone; start from the newest checkpoint"
            )
        if state.stop_cause:
            return wire.Stop(state.stop_cause)
        drop_untrainable(self._journal, message.step)
        void_after(self._journal, message.step)
        self._journal.write(records.StepsCommitted(now, message.incarnation, message.step))
        fact = records.LearnerResumed(now, message.incarnation, message.step, message.instance)
        self._journal.write(fact)
        return wire.Resumed(state.last_sampled - message.step)

    def sample(self, message: wire.Sample) -> wire.Batch | wire.Wait | wire.Refused | wire.Stop:
        """Serve the batch of step + 1, recorded or new, or say why there is none."""
        state, step = self._state, message.step + 1
        if state.stop_cause:
            return wire.Stop(state.stop_cause)
        if step in state.batches and step <= state.served + 1:
            if step > state.served:
                self._journal.write(records.Resampled(self._journal.now, message.incarnation, step))
            return self._batch(step)
        if step != state.last_sampled + 1 or state.serving_again:
            return wire.Refused(f"step {step} is out of order: step {state.served + 1} comes next")
        self._caught_up(message)
        choice = self._choose(message.step)
        if not choice.group_ids:
            now = self._journal.now
            reason = describe_batch_wait(state, self._roster, step, choice.oldest, now)
            return wire.Wait(reason, choice.oldest)
        gauges = self._batch_gauges(message.step, [state.ready[i] for i in choice.group_ids])
        self._journal.write(
            records.Sampled(
                self._journal.now,
                message.incarnation,
                step,
                choice.group_ids,
                tuple(state.unannounced),
                gauges,
            )
        )
        return self._batch(step)

    def sample_part(self, message: wire.SamplePart) -> wire.BatchPart | wire.Refused | wire.Stop:
        """Serve a part of a batch that has been served, as often as it is asked for."""
        if self._state.stop_cause:
            return wire.Stop(self._state.stop_cause)
        if message.step not in self._state.batches or message.step > self._state.served:
            return wire.Refused(f"step {message.step} is none whose batch is out: say Sample first")
        parts = self._parts(message.step)
        if message.part >= len(parts):
            return wire.Refused(
                f"step {message.step} has no part {message.part}, only {len(parts)}"
            )
        return wire.BatchPart(message.step, message.part, parts[message.part])

    def committed(self, message: wire.Committed) -> wire.Done | wire.Refused:
        """Forget the payloads of steps ≤ `step`: their training is durable."""
        if message.step > self._state.served:
            return wire.Refused(
                f"step {message.step} was never sampled: {self._state.served} was last"
            )
        if message.step > self._state.committed:
            self._journal.write(
                records.StepsCommitted(self._journal.now, message.incarnation, message.step)
            )
        return wire.Done()

    def evaluate(self, message: wire.Evaluate) -> wire.EvalProgress | wire.Stop:
        """Open the evaluation of this step, once; say how far it is."""
        if self._state.stop_cause:
            return wire.Stop(self._state.stop_cause)
        self._caught_up(message)
        if message.step not in self._state.evaluations:
            self._journal.write(records.EvaluationOpened(self._journal.now, message.step))
            finish_evaluations(self._journal)
        evaluation = self._state.evaluations[message.step]
        return wire.EvalProgress(*evaluation.progress, evaluation.result)

    def report(self, message: wire.Report) -> wire.Done:
        """Record the learner's numbers, once."""
        if not self._is_last_report(wire.StepReport(message.step, message.gauges)):
            fact = records.Reported(
                self._journal.now, message.incarnation, message.step, message.gauges
            )
            self._journal.write(fact)
        return wire.Done()

    def finish(self, message: wire.Finish) -> wire.Done:
        """End the run."""
        end_run(self._journal, message.cause)
        return wire.Done()

    def _is_last_report(self, report: wire.StepReport) -> bool:
        # Compared as bytes: a number that is not one differs from itself.
        kept = self._state.reports.kept
        return bool(kept) and _ENCODER.encode(kept[-1]) == _ENCODER.encode(report)

    def _fence(self, incarnation: int) -> wire.Refused | None:
        current = self._state.incarnation
        if incarnation < current:
            return wire.Refused(f"incarnation {incarnation} is over: {current} has resumed")
        if incarnation > current or current == 0:
            return wire.Refused(f"incarnation {incarnation} is not known here: say Resume first")
        return None

    def _caught_up(self, message: wire.Sample | wire.Evaluate) -> None:
        """Let leasing go on: a learner that asks for something new serves weights of its own."""
        state = self._state
        if state.catching_up and not state.serving_again:
            fact = records.CaughtUp(self._journal.now, message.incarnation, state.served)
            self._journal.write(fact)

    def _choose(self, step: int) -> Choice:
        if len(self._state.ready) < self._bounds.groups_per_step:
            return Choice(())  # without a look at a thousand open groups
        ready = [(g.version, g.group_id) for g in self._state.ready.values()]
        unfinished = [(g.version, g.group_id) for g in self._state.opened.values()]
        return choose_batch(ready, unfinished, step, self._bounds)

    def _batch(self, step: int) -> wire.Batch:
        fact = self._state.batches[step]
        groups = [self._state.sampled[group_id] for group_id in fact.group_ids]
        found = [self._state.evaluations.get(step) for step in fact.evaluations]
        payloads = tuple(tuple(g.payloads[i] for i in range(g.size)) for g in groups)
        parts = len(self._parts(step))
        return wire.Batch(
            step=step,
            group_ids=fact.group_ids,
            versions=tuple(group.version for group in groups),
            groups=payloads if parts == 1 else (),
            gauges=fact.gauges,
            fleet=self._roster.fleet(),
            evaluations=tuple(e.result for e in found if e is not None and e.result is not None),
            parts=0 if parts == 1 else parts,
            sizes=() if parts == 1 else tuple(group.size for group in groups),
        )

    def _parts(self, step: int) -> list[tuple[bytes, ...]]:
        groups = [self._state.sampled[i] for i in self._state.batches[step].group_ids]
        return cut([g.payloads[i] for g in groups for i in range(g.size)], PART_BYTES)

    def _batch_gauges(self, step: int, groups: list[Group]) -> dict[str, float]:
        trained = [summary for group in groups for summary in group.summaries.values()]
        return self._state.gauges() | {
            "replay/staleness": float(step - min(group.oldest_version for group in groups)),
            "replay/trained_searches_per_rollout": sum(s.searches for s in trained) / len(trained),
        }

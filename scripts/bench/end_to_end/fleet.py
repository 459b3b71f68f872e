"""The asynchronous modes: the real launcher and fleet, ended once the steps that count are done."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from configs.runtime.process import Exit
from configs.schema import Config
from replay.log import records
from replay.log.event_log import FILE_NAME, read_whole
from replay.log.history import GroupHistory
from replay.protocol import StepReport
from scripts.bench.end_to_end.record import Evaluation, Job, Record, Step, Turns, turns_of
from scripts.bench.harness import BenchError
from scripts.fleet.console import Console
from scripts.fleet.launch import run


class UntilStep(Console):
    """A run's console that ends it, as Ctrl-C would, after a step."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def step(self, report: StepReport, total_steps: int) -> None:
        """One line."""
        super().step(report, total_steps)
        if report.step == self._last:
            os.kill(os.getpid(), signal.SIGINT)


def train(job: Job, config: Config) -> Record:
    """Launch, watch, read the log. Raises BenchError for a run that did not get so far."""
    run_dir = Path(config.run_dir)
    code = run(config, Console() if job.learns else UntilStep(job.steps))
    found = recorded(read_whole(run_dir / FILE_NAME))
    expected = Exit.DONE if job.learns else Exit.INTERRUPTED
    if code != expected or len(found.steps) < job.steps:
        raise BenchError(f"the run ended with {code} after {len(found.steps)} steps")
    # The run goes on until it hears of its end.
    return Record(found.steps[: job.steps], found.evaluations)


def recorded(log: Iterable[records.Record]) -> Record:
    """The record of a run by its log."""
    groups, steps, evaluations = GroupHistory(), list[Step](), list[Evaluation]()
    tokens, turns = dict[int, int](), dict[int, Turns]()
    sampled, begun_s = 0, 0.0
    for record in log:
        groups.take(record)
        match record:
            case records.GroupOpened() if record.kind == "train":
                begun_s = begun_s or record.now
            case records.Delivered() if record.summary.kind == "train":
                sampled += record.summary.action_tokens
            case records.Sampled():
                facts = [fact for _, delivered in groups.train(record) for fact in delivered]
                tokens[record.step] = sum(fact.summary.action_tokens for fact in facts)
                turns[record.step] = turns_of(fact.payload for fact in facts)
            case records.Reported() if record.step:
                step = record.step
                steps.append(_step(record, tokens[step], sampled, turns[step]))
                sampled = 0
            case records.EvaluationFinished():
                found, after_s = record.result, max(0.0, record.now - (begun_s or record.now))
                evaluations.append(Evaluation(found.step, after_s, found.em, found.sampled_em))
            case _:
                pass
    return Record(tuple(steps), tuple(evaluations))


def _step(record: records.Reported, tokens: int, sampled: int, turns: Turns) -> Step:
    gauges = record.gauges
    return Step(
        at_s=record.now,
        update_s=gauges["learner/update_s"],
        wait_s=gauges["learner/wait_for_batch_s"] + gauges["learner/wait_for_oldest_s"],
        pause_s=gauges.get("sync/generation_pause_s", 0.0),
        tokens=tokens,
        sampled=sampled,
        staleness=gauges["replay/staleness"],
        staleness_max=gauges["replay/staleness_max"],
        oldest_s=gauges["learner/wait_for_oldest_s"],
        turns=turns,
    )

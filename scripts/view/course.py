"""The course of a run's training, folded from its records: what the learner does, what its batches
were like, and the forecast of their staleness.

Staleness is told in the two parts that `forage plan` tells: the steps from a rollout's oldest
version to the end of its group, and those from there to its batch, both on average over the
rollouts of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replay.log import records as facts
from replay.log.summary import Summary
from scripts.runs.forecast import Forecast, forecast
from scripts.runs.runs import LATEST

BEFORE, INSIDE = "view/staleness_before_queue", "view/staleness_in_queue"
TOKENS, TURNS = "view/tokens_per_rollout", "view/turns_per_rollout"
HELD = 0.95  # of a learner's time that it is busy: from here on it holds the engines back


@dataclass
class _Group:
    """A train group: its rollouts, and the step that was completed when the last one came."""

    rollouts: list[Summary] = field(default_factory=list)
    closed: int = 0


@dataclass
class _Pace:
    """Sums over the time since the first step was reported, without that between two launches."""

    seconds: float = 0.0
    rollouts: int = 0
    rollout_s: float = 0.0
    squares_s: float = 0.0
    busy_s: float = 0.0
    waited_s: float = 0.0


class Course:
    """Folds the records of one run."""

    def __init__(self) -> None:
        self.completed = self.batch = -1  # the last step that was reported, and the last batch's
        self.since = 0.0  # when one of them changed
        self.evaluating: dict[int, float] = {}  # evaluations under way, and since when
        self.published = (-1, 0.0)  # the newest version, and when it was put out
        self._groups: dict[int, _Group] = {}
        self._pace = _Pace()
        self._counts = False
        self._last = 0.0

    def take(self, record: facts.Record) -> None:
        """Take any record but a delivery."""
        now, gap = record.now, max(record.now - self._last, 0.0)
        if self._counts and not isinstance(record, facts.RunResumed):
            self._pace.seconds += gap
        self._last = max(self._last, now)
        match record:
            case facts.LearnerResumed():
                self.completed = self.batch = record.step
                self.since = now
                if self.published[0] < 0:  # the first; one that goes on serves once it caught up
                    self.published = record.step, now
            case facts.CaughtUp():
                self.published = record.step, now
            case facts.Resampled():
                self.batch, self.since = record.step, now
            case facts.GroupDropped():
                self._groups.pop(record.group_id, None)
            case facts.EvaluationOpened():
                self.evaluating[record.step] = now
            case facts.EvaluationFinished():
                self.evaluating.pop(record.result.step, None)
            case facts.EvaluationVoided():
                self.evaluating.pop(record.step, None)
            case _:
                pass

    def deliver(self, record: facts.Delivered, begun: float) -> None:
        """Take a delivery of a rollout that began then."""
        now = record.now
        if self._counts:
            self._pace.seconds += max(now - self._last, 0.0)
        self._last = max(self._last, now)
        if record.summary.kind != "train":
            return
        group = self._groups.setdefault(record.group_id, _Group())
        group.rollouts.append(record.summary)
        group.closed = max(self.completed, 0)
        if self._counts:
            lasted = now - begun
            self._pace.rollouts += 1
            self._pace.rollout_s += lasted
            self._pace.squares_s += lasted * lasted

    def sample(self, record: facts.Sampled) -> dict[str, float]:
        """Take a batch; return what its rollouts were like on average."""
        self.batch, self.since = record.step, record.now
        step = record.step - 1
        groups = [self._groups.pop(each) for each in record.group_ids if each in self._groups]
        rollouts = [each for group in groups for each in group.rollouts]
        if not rollouts:
            return {}
        closed = [min(group.closed, step) for group in groups for _ in group.rollouts]
        oldest = [each.oldest_version for each in rollouts]
        parts = [
            (max(end - age, 0), step - max(end, age))
            for end, age in zip(closed, oldest, strict=True)
        ]
        return {
            BEFORE: _mean([before for before, _ in parts]),
            INSIDE: _mean([inside for _, inside in parts]),
            TOKENS: _mean([each.action_tokens for each in rollouts]),
            TURNS: _mean([each.turns for each in rollouts]),
        }

    def report(self, record: facts.Reported, published: bool) -> None:
        """Take the gauges of a step, of which the version was published or not."""
        self.completed, self.since = record.step, record.now
        if published:
            self.published = record.step, record.now
        if self._counts:
            gauges = record.gauges
            sent_s = _seconds(gauges, "sync/publish_s") if published else 0.0
            self._pace.busy_s += _seconds(gauges, "learner/update_s") + sent_s
            self._pace.waited_s += _seconds(gauges, "learner/wait_for_batch_s")
        self._counts = True

    def forecast(self, batch: int, bound: int) -> Forecast | None:
        """The published forecast at the paces that were measured, of batches of so many rollouts
        under a bound of staleness; None while there are none.
        """
        pace = self._pace
        learner_s = pace.busy_s + pace.waited_s
        if not (pace.rollout_s and pace.seconds and learner_s):
            return None
        in_flight = pace.rollout_s / pace.seconds
        ratio = pace.busy_s / learner_s
        return forecast(
            concurrency=in_flight,
            batch=batch,
            ratio=1.0 if ratio >= HELD else ratio,
            queue=max(0.0, bound - in_flight / batch),
            tail=pace.squares_s * pace.rollouts / pace.rollout_s**2,
        )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _seconds(gauges: Mapping[str, float], name: str) -> float:
    value = gauges.get(name, 0.0)
    return value if 0.0 < value <= LATEST else 0.0  # no sum of such is beyond all numbers

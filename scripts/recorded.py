"""A run's recorded batches, as the learner was given them; a log that lacks one is refused."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from configs.load import parse
from configs.schema import Config
from replay.log import FILE_NAME, read_whole
from replay.protocol import Batch, LogError
from replay.records import (
    Delivered,
    LearnerResumed,
    Record,
    Reported,
    RunResumed,
    RunStarted,
    Sampled,
)
from replay.searches import GroupHistory


@dataclass
class Recording:
    """The surviving batches of a log, with the configurations in force and the learner's reports.

    `texts`: resolved configurations (YAML) by the first step each was in force for; `places`: by
    step, where in the log its batch was put together for the last time; `reports`: the learner's
    gauges by step.
    """

    path: Path
    texts: dict[int, str] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    reports: dict[int, dict[str, float]] = field(default_factory=dict)
    _resumed_with: str = ""
    _compacted: set[int] = field(default_factory=set)  # groups
    _without_payloads: set[int] = field(default_factory=set)  # steps

    @classmethod
    def of(cls, run_dir: str | Path) -> "Recording":
        """Read a run's log once. Raises LogError without one, without a batch, on a gap, and
        where payloads of a batch were compacted away.
        """
        recording = cls(Path(run_dir) / FILE_NAME)
        for place, record in enumerate(read_whole(recording.path)):
            recording._take(place, record)
        recording._check()
        return recording

    def in_force(self, step: int) -> int:
        """Return the first step trained under the same configuration as `step`."""
        return max(first for first in self.texts if first <= step)

    def config(self, step: int, overrides: Sequence[str] = ()) -> Config:
        """Return the configuration in force when `step` was trained, with `a.b=c` overrides. Raises
        ConfigError.
        """
        return parse(self.texts[self.in_force(step)], overrides, str(self.path))

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of steps 1, 2, …; payloads are held until their group is trained or
        dropped.
        """
        groups = GroupHistory()
        for place, record in enumerate(read_whole(self.path)):
            groups.take(record)
            if isinstance(record, Sampled) and self.places.get(record.step) == place:
                trained = groups.train(record)
                yield Batch(
                    step=record.step,
                    group_ids=record.group_ids,
                    versions=tuple(opened.version for opened, _ in trained),
                    groups=tuple(_payloads(delivered) for _, delivered in trained),
                    gauges=record.gauges,
                    fleet={},
                    evaluations=(),
                )

    def _take(self, place: int, record: Record) -> None:
        match record:
            case RunStarted():
                self.texts = {1: record.config}
            case RunResumed():
                self._resumed_with = record.config
            case LearnerResumed() if self._resumed_with:
                before = {step: text for step, text in self.texts.items() if step <= record.step}
                self.texts = {**before, record.step + 1: self._resumed_with}
                self._resumed_with = ""
            case Delivered() if record.compacted:
                self._compacted.add(record.group_id)
            case Sampled():
                gone = not self._compacted.isdisjoint(record.group_ids)
                (self._without_payloads.add if gone else self._without_payloads.discard)(
                    record.step
                )
                # Put together anew, a step takes all that followed its first batch with it.
                kept = {step: at for step, at in self.places.items() if step < record.step}
                self.places = {**kept, record.step: place}
            case Reported():
                self.reports[record.step] = record.gauges
            case _:
                pass

    def _check(self) -> None:
        if gone := sorted(self._without_payloads & self.places.keys()):
            raise LogError(
                f"{self.path}: the trajectories of {len(gone)} steps, {gone[0]} to {gone[-1]}, "
                "were compacted away (forage compact): learn from a copy of the log from before"
            )
        if 1 not in self.texts:
            raise LogError(f"{self.path}: no RunStarted record: the run's configuration is unknown")
        if not self.places:
            raise LogError(
                f"{self.path}: no batch was put together: there is nothing to learn from"
            )
        for expected, step in enumerate(self.places, start=1):
            if step != expected:
                raise LogError(
                    f"{self.path}: the batch of step {expected} is not on record, that of step "
                    f"{step} is: what was trained between is unknown"
                )


def _payloads(delivered: Iterable[Delivered]) -> tuple[bytes, ...]:
    return tuple(fact.payload for fact in sorted(delivered, key=lambda fact: fact.sibling))


def recorded_batches(run_dir: str | Path) -> Iterator[Batch]:
    """Return the surviving history's batches, in order. Raises LogError as `Recording.of` does."""
    return Recording.of(run_dir).batches()

"""A run's history, read back from its event log: deliveries joined to the groups they belong to,
the searches of its rollouts, and its batches as the learner was given them.

A last record that is cut short is left out, and what was compacted away is counted. The ledger's
state has a fold of its own, in `replay.ledger.state`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from configs.load import parse
from configs.schema import Config
from replay.codec import decode_wire
from replay.log.event_log import FILE_NAME, read_whole
from replay.log.records import (
    Delivered,
    GroupDropped,
    GroupOpened,
    LearnerResumed,
    LeaseReturned,
    Record,
    Reported,
    RunResumed,
    RunStarted,
    Sampled,
)
from replay.protocol import Batch, LogError
from replay.trajectory import Kind, Question, Search


def deliveries(records: Iterable[Record]) -> Iterator[tuple[GroupOpened, Delivered]]:
    """Join every delivery to the opening of its group, in the order of the deliveries."""
    opened: dict[int, GroupOpened] = {}
    for record in records:
        if isinstance(record, GroupOpened):
            opened[record.group_id] = record
        elif isinstance(record, Delivered):
            yield opened[record.group_id], record


class GroupHistory:
    """A fold over records: `opened` holds every group by id, `waiting` the deliveries of each train
    group that is neither trained nor dropped.
    """

    def __init__(self) -> None:
        self.opened: dict[int, GroupOpened] = {}
        self.waiting: dict[int, list[Delivered]] = {}

    def take(self, record: Record) -> None:
        """Take in one record."""
        match record:
            case GroupOpened():
                self.opened[record.group_id] = record
            case Delivered() if record.summary.kind == "train":
                self.waiting.setdefault(record.group_id, []).append(record)
            case GroupDropped():
                self.waiting.pop(record.group_id, None)
            case _:
                pass

    def train(self, sampled: Sampled) -> list[tuple[GroupOpened, list[Delivered]]]:
        """Take out the groups of a step, in its order, with their deliveries."""
        return [(self.opened[id], self.waiting.pop(id, [])) for id in sampled.group_ids]


class Searched(msgspec.Struct, frozen=True):
    """The searches of one rollout: `turns[n]` are those of its turn n, their passages in the order
    shown.

    `now`: when it was put on record, in seconds since the epoch; `seed`: that of its lease.
    """

    now: float
    actor_id: str
    kind: Kind
    question: Question
    group_id: int
    sibling: int
    seed: int
    turns: tuple[tuple[Search, ...], ...]


class SearchLog:
    """The searches of one run; `compacted` counts rollouts that the last fold lacked."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.compacted = 0

    @property
    def config(self) -> Config:
        """The configuration that the run was started with. Raises LogError, ConfigError."""
        first = next(read_whole(self.path), None)
        if not isinstance(first, RunStarted):
            raise LogError(f"{self.path}: no RunStarted record: the run's configuration is unknown")
        return parse(first.config, (), str(self.path))

    def rollouts(self) -> Iterator[Searched]:
        """Yield every delivered rollout, also one without a search, in the order of the deliveries.

        One that an earlier delivery of its sibling superseded is not among them. Raises LogError,
        CodecError.
        """
        self.compacted = 0
        for opened, delivered in deliveries(read_whole(self.path)):
            if delivered.compacted:
                self.compacted += 1
            else:
                yield _searched(delivered, opened.question)

    def failed(self) -> Iterator[LeaseReturned]:
        """Yield every lease that ended without a trajectory. Its `searches`, as far as its actor
        told them, hold passages best first, in whatever order they were shown. Raises LogError.
        """
        return (record for record in read_whole(self.path) if isinstance(record, LeaseReturned))


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
        """Read a run's log once. Raises LogError where there is no log or no batch, where a batch
        is missing between others, and where payloads of one were compacted away.
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
        """Return `step`'s configuration, with `a.b=c` overrides. Raises ConfigError."""
        return parse(self.texts[self.in_force(step)], overrides, str(self.path))

    def batches(self) -> Iterator[Batch]:
        """Yield batches from step 1 on; payloads stay until their group is trained or dropped."""
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
                "were compacted away (replay.keep, forage compact): learn from a copy of the log "
                "from before"
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


def recorded_batches(run_dir: str | Path) -> Iterator[Batch]:
    """Return the surviving history's batches, in order. Raises LogError as `Recording.of` does."""
    return Recording.of(run_dir).batches()


def _searched(record: Delivered, question: Question) -> Searched:
    rollout = decode_wire(record.payload)
    return Searched(
        now=record.now,
        actor_id=record.actor_id,
        kind=record.summary.kind,
        question=question,
        group_id=record.group_id,
        sibling=record.sibling,
        seed=rollout.sampling.seed,
        turns=tuple(
            tuple(Search(s.query, s.passage_ids, s.seconds, s.status) for s in turn.searches)
            for turn in rollout.turns
        ),
    )


def _payloads(delivered: Iterable[Delivered]) -> tuple[bytes, ...]:
    return tuple(fact.payload for fact in sorted(delivered, key=lambda fact: fact.sibling))

"""A run's history, read back from its event log: deliveries joined to the groups they belong to.

A last record that is cut short is left out, and what was compacted away is counted. The ledger's
state has a fold of its own, in `replay.books`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from configs.load import parse
from configs.schema import Config
from replay.codec import decode_wire
from replay.log import FILE_NAME, read_whole
from replay.protocol import LogError
from replay.records import (
    Delivered,
    GroupDropped,
    GroupOpened,
    LeaseReturned,
    Record,
    RunStarted,
    Sampled,
)
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
    """The searches of one run. `compacted`: rollouts that the last fold found without theirs."""

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

        A rollout that came after its sibling had been delivered leaves none. Raises LogError,
        CodecError.
        """
        self.compacted = 0
        for opened, delivered in deliveries(read_whole(self.path)):
            if delivered.compacted:
                self.compacted += 1
            else:
                yield _searched(delivered, opened.question)

    def failed(self) -> Iterator[LeaseReturned]:
        """Yield every lease that ended without a trajectory; in its `searches`, as far as its actor
        could tell, passages are best first, whatever order they were shown in. Raises LogError.
        """
        return (record for record in read_whole(self.path) if isinstance(record, LeaseReturned))


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

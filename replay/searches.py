"""Every search on record, as one fold over a run's event log: who made it and what it brought.

Consumes `<run>/events.log`; produces what each delivered rollout searched for, in the order of the
deliveries, and what each failed one did, as far as its actor could still tell. Waits for nothing. A
last record that is cut short is left out. A rollout that came after its sibling had been delivered
leaves no searches; what was compacted away is counted.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from configs.load import parse
from configs.schema import Config
from replay.codec import decode_wire
from replay.log import FILE_NAME, read_whole
from replay.protocol import LogError
from replay.records import Delivered, GroupOpened, LeaseReturned, RunStarted
from replay.trajectory import Kind, Question, Search


class Searched(msgspec.Struct, frozen=True):
    """What one rollout searched for: `turns[n]` are the searches of its turn n, their passages in
    the order shown.

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
        """What the run was started with. Raises LogError, ConfigError."""
        first = next(read_whole(self.path), None)
        if not isinstance(first, RunStarted):
            raise LogError(f"{self.path}: no RunStarted record: the run's configuration is unknown")
        return parse(first.config, (), str(self.path))

    def rollouts(self) -> Iterator[Searched]:
        """Every delivered rollout, also one without a search. Raises LogError, CodecError."""
        questions: dict[int, Question] = {}
        self.compacted = 0
        for record in read_whole(self.path):
            match record:
                case GroupOpened():
                    questions[record.group_id] = record.question
                case Delivered() if record.compacted:
                    self.compacted += 1
                case Delivered():
                    yield _searched(record, questions[record.group_id])
                case _:
                    pass

    def failed(self) -> Iterator[LeaseReturned]:
        """Every lease that ended without a trajectory, its searches in `searches`: their passages
        best first, whatever order they were shown in. Raises LogError.
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

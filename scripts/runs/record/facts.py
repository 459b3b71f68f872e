"""Records of the event log, as docs/records.md has them: the fields that the books are kept from.

Written down a second time on purpose: what reads a run for the audit must not be what wrote it.
"""

from typing import Literal

import msgspec

Kind = Literal["train", "eval"]
# The parts that evaluations tell the means of.
PARTS = (
    "em", "f1", "substring", "format", "retrieval_hit", "search_cost", "avoidance", "environment",
    "similarity", "judge", "custom",
)  # fmt: skip


class Fact(msgspec.Struct, frozen=True, tag=True):
    """A record: its `type` is the name of the class."""

    now: float


class OfLease(Fact, frozen=True):
    """A record about one sibling that an actor has leased."""

    actor_id: str
    group_id: int
    sibling: int


class OfStep(Fact, frozen=True):
    """A record about one step of a learner."""

    incarnation: int
    step: int


class Question(msgspec.Struct, frozen=True):
    """What a group asks."""

    id: str
    hops: int = 0
    source: str = ""


class Summary(msgspec.Struct, frozen=True):
    """What the record claims of its payload."""

    group_id: int
    sibling: int
    question_id: str
    kind: Kind
    reward: float | None
    searches: int
    malformed: int
    turns: int
    action_tokens: int
    oldest_version: int
    newest_version: int
    reward_cause: str = ""
    parts: dict[str, float] = {}


class Compacted(msgspec.Struct, frozen=True):
    """What is left of a payload that was taken away."""

    payload_bytes: int
    version_sum: int


class SetResult(msgspec.Struct, frozen=True):
    """What the record claims that the questions of one data set came to."""

    questions: int
    em: float
    sampled_em: float | None
    searches: float
    parts: dict[str, float] = {}
    sampled_parts: dict[str, float] = {}


class EvalResult(msgspec.Struct, frozen=True):
    """What the record claims that an evaluation came to."""

    step: int
    questions: int
    em: float
    sampled_em: float | None
    em_by_hops: dict[str, float]
    sampled_em_by_hops: dict[str, float]
    searches: float
    oldest_version: int
    newest_version: int
    parts: dict[str, float] = {}
    sampled_parts: dict[str, float] = {}
    sets: dict[str, SetResult] = {}


class RunStarted(Fact, frozen=True):
    seed: int
    config: str


class RunResumed(Fact, frozen=True):
    config: str


class ReplayRestarted(Fact, frozen=True):
    pass


class ActorJoined(Fact, frozen=True):
    pass


class ActorLeft(Fact, frozen=True):
    pass


class GroupOpened(Fact, frozen=True):
    group_id: int
    kind: Kind
    question: Question
    incarnation: int
    version: int
    evaluation: int = -1


class Leased(Fact, frozen=True):
    actor_id: str
    group_id: int
    siblings: tuple[int, ...]
    attempts: tuple[int, ...]


class Adopted(OfLease, frozen=True):
    pass


class Delivered(OfLease, frozen=True):
    payload: bytes
    summary: Summary
    compacted: Compacted | None = None


class Superseded(OfLease, frozen=True):
    status: str


class LeaseReturned(OfLease, frozen=True):
    cause: str


class GroupDropped(Fact, frozen=True):
    group_id: int
    cause: str


class QuestionRetired(Fact, frozen=True):
    pass


class Sampled(OfStep, frozen=True):
    group_ids: tuple[int, ...]
    gauges: dict[str, float]


class Resampled(OfStep, frozen=True):
    pass


class StepsCommitted(OfStep, frozen=True):
    pass


class LearnerResumed(OfStep, frozen=True):
    pass


class CaughtUp(OfStep, frozen=True):
    pass


class EvaluationOpened(Fact, frozen=True):
    step: int


class EvaluationFinished(Fact, frozen=True):
    result: EvalResult


class EvaluationVoided(Fact, frozen=True):
    step: int


class Reported(OfStep, frozen=True):
    pass


class Stopped(Fact, frozen=True):
    cause: str


Record = (
    RunStarted
    | RunResumed
    | ReplayRestarted
    | ActorJoined
    | ActorLeft
    | GroupOpened
    | Leased
    | Adopted
    | Delivered
    | Superseded
    | LeaseReturned
    | GroupDropped
    | QuestionRetired
    | Sampled
    | Resampled
    | StepsCommitted
    | LearnerResumed
    | CaughtUp
    | EvaluationOpened
    | EvaluationFinished
    | EvaluationVoided
    | Reported
    | Stopped
)
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def record_of(payload: bytes) -> Record:
    """Return the record that these bytes hold. Raises ValueError."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error

"""Records of the event log: facts, in the order in which they became true.

The ledger decides, writes records and changes only through them, so recovery, resume, audit and
offline relearning are folds over this one list. Train groups count from 1 in opening order; eval
groups apart, from `EVAL_GROUPS` on: tokens are seeded by their group's id, so evaluating more or
less often changes nothing that is trained.
"""

from pathlib import Path

import msgspec

from replay.log.summary import Summary
from replay.protocol import EvalResult, LogError
from replay.trajectory import Kind, Question, Search

EVAL_GROUPS = 10**12


class Fact(msgspec.Struct, frozen=True, tag=True):
    """A tagged record; `now`: when it was written, in seconds since the epoch."""

    now: float


class LeaseFact(Fact, frozen=True):
    """A fact about one sibling that an actor has leased."""

    actor_id: str
    group_id: int
    sibling: int


class StepFact(Fact, frozen=True):
    """A fact about one step of a learner."""

    incarnation: int
    step: int


class RunStarted(Fact, frozen=True):
    """First record of a log: the resolved configuration (YAML) and the run's seed."""

    seed: int
    config: str


class RunResumed(Fact, frozen=True):
    """The run goes on: a new replay process has folded the log; all that ran before it is gone.

    It may follow any record, `Stopped` too, which it takes back. `config` is the resolved
    configuration (YAML) from here on.
    """

    config: str


class ReplayRestarted(Fact, frozen=True):
    """Replay alone was killed and has folded the log; learner and actors live on. Nothing ends by
    it: incarnation, leases and served batches stand, and so does `Stopped`.
    """


class ActorJoined(Fact, frozen=True):
    """An actor said hello and was taken; `node`: what it runs on."""

    actor_id: str
    tokenizer_digest: str
    node: str = ""


class ActorLeft(Fact, frozen=True):
    """An actor said goodbye, died, or did not come back; what it held was returned before."""

    actor_id: str
    cause: str


class GroupOpened(Fact, frozen=True):
    """A question was opened under a new group id; `version` is what the opening actor had applied.

    `evaluation` is the step of the evaluation that it belongs to; -1 for train groups.
    """

    group_id: int
    kind: Kind
    question: Question
    incarnation: int
    version: int
    evaluation: int = -1


class Leased(Fact, frozen=True):
    """Siblings of one group were leased, or re-leased, to one actor, on `node`; `attempts`: how
    many rollouts of each had failed by themselves.
    """

    actor_id: str
    group_id: int
    siblings: tuple[int, ...]
    attempts: tuple[int, ...]
    node: str = ""


class Adopted(LeaseFact, frozen=True):
    """An actor announced, in its hello, a lease that replay no longer counted as its own."""


class Compacted(msgspec.Struct, frozen=True):
    """The rest of a payload that was taken away: its size, and the sum of its tokens' versions."""

    payload_bytes: int
    version_sum: int


class Delivered(LeaseFact, frozen=True):
    """The first durable delivery of a sibling: the encoded trajectory and its summary.

    Where `compacted` says so the payload is empty: its group is committed, or dropped, or of a
    finished evaluation, and nothing that goes on with the run asks for it again.
    """

    payload: bytes
    summary: Summary
    compacted: Compacted | None = None


class Superseded(LeaseFact, frozen=True):
    """A delivery not needed: `superseded` (an earlier one won) or `dropped` (the group is gone)."""

    status: str


class LeaseReturned(LeaseFact, frozen=True):
    """A lease ended without a trajectory: it failed, or its actor left. `searches`: those that its
    rollout had made, as far as it could tell.
    """

    cause: str
    searches: tuple[Search, ...] = ()


class GroupDropped(Fact, frozen=True):
    """A group will never be trained.

    Causes: `group_deadline` (its question is requeued), `no_signal`, `unscorable` (no sibling has a
    reward), `question_failed`, `resumed`, `run_ended`.
    """

    group_id: int
    cause: str


class QuestionRetired(Fact, frozen=True):
    """A train question failed too often: it is asked no more, its group is `question_failed`."""

    question_id: str
    failures: int


class Sampled(StepFact, frozen=True):
    """The batch that trains `step` was put together; group ids ascend.

    `evaluations` are the steps of the evaluations first reported with it; `gauges` are replay's
    own numbers then.
    """

    group_ids: tuple[int, ...]
    evaluations: tuple[int, ...]
    gauges: dict[str, float]


class Resampled(StepFact, frozen=True):
    """A recorded batch was served again, to a resumed learner."""


class StepsCommitted(StepFact, frozen=True):
    """A checkpoint of `step` is durable: steps ≤ it are committed, their payloads forgotten."""


class LearnerResumed(StepFact, frozen=True):
    """Process `instance` started as learner, `step` steps done; older incarnations are refused."""

    instance: str = ""


class CaughtUp(StepFact, frozen=True):
    """A resumed learner has trained the recorded batches again, and its actors have its weights."""


class EvaluationOpened(Fact, frozen=True):
    """The learner asked for an evaluation of the policy at `step`."""

    step: int


class EvaluationFinished(Fact, frozen=True):
    """Every evaluation question has been answered or given up."""

    result: EvalResult


class EvaluationVoided(Fact, frozen=True):
    """An unfinished evaluation of a step that is trained again; it may be asked for again."""

    step: int


class Reported(StepFact, frozen=True):
    """The learner's gauges after `step`."""

    gauges: dict[str, float]


class Stopped(Fact, frozen=True):
    """No more leases and no more batches, for this cause."""

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


def decoded(path: Path, offset: int, payload: bytes) -> Record:
    """Decode the record of a frame. Raises LogError."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LogError(f"{path}: offset {offset}: {error}") from error

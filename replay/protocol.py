"""The messages that cross replay's socket, and this package's errors. A leaf.

Versions are ordered as (incarnation, policy_version): each learner start has a higher incarnation.
An actor *states* what it can do (`Ready`), it never asks: replay pushes leases whenever admission
allows, and counts what it has leased out itself, so a stale statement cannot over-commit.
"""

import msgspec

from replay.trajectory import Kind, Question, Sampling, Search

PROTOCOL = 6


class ReplayError(Exception):
    """Root of this package's errors.

    ReplayError
    ├── CodecError      bytes that are not a valid record or message
    │   └── Garbled     bytes of a message that were changed on the way: as good as lost
    ├── LogError        an event log that cannot be read or written; names file and offset
    ├── ReplayTimeout   a named wait passed its deadline
    └── RefusedByReplay replay refused a message, with its reason
    """


class CodecError(ReplayError):
    """Bytes that are not a valid message, record or trajectory."""


class Garbled(CodecError):
    """A message whose checksum does not agree."""


class LogError(ReplayError):
    """The event log cannot be read or written; the message names file and offset."""


class ReplayTimeout(ReplayError):
    """A named wait passed its deadline."""


class RefusedByReplay(ReplayError):
    """Replay refused a message; the text is its reason."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """A tagged message."""


class SetResult(msgspec.Struct, frozen=True):
    """Means over the answered questions of one data set; `parts`: of what else was scored."""

    questions: int
    em: float  # greedy
    sampled_em: float | None
    searches: float  # mean per greedy rollout
    parts: dict[str, float] = {}
    sampled_parts: dict[str, float] = {}


class EvalResult(msgspec.Struct, frozen=True):
    """One finished evaluation: exact match over all its questions, and by hops (as strings).

    `parts`: means of what else was scored, of each part that nine tenths of the rollouts tell;
    `sets`: the same of each data set, where questions name theirs.
    """

    step: int
    questions: int
    em: float  # greedy
    sampled_em: float | None  # at learner.eval_temperature; None: greedy alone
    em_by_hops: dict[str, float]
    sampled_em_by_hops: dict[str, float]
    searches: float  # mean per greedy rollout
    oldest_version: int
    newest_version: int
    parts: dict[str, float] = {}
    sampled_parts: dict[str, float] = {}
    sets: dict[str, SetResult] = {}


class StepReport(msgspec.Struct, frozen=True):
    """One learner step's gauges."""

    step: int
    gauges: dict[str, float]


# ---- actors → replay


class Hello(Message, frozen=True):
    """First message of an actor, and again after Unknown: who it is, which leases it still works on
    (`held`), and what it has delivered without an acknowledgement so far (`delivering`).
    """

    actor_id: str
    tokenizer_digest: str
    held: tuple[tuple[int, int], ...] = ()  # (group_id, sibling)
    protocol: int = PROTOCOL
    delivering: tuple[tuple[int, int], ...] = ()  # (group_id, sibling)
    instance: str = ""  # drawn by each process: the same actor on another connection
    node: str = ""  # that it runs on (configs.runtime.node)


class Ready(Message, frozen=True):
    """An actor's statement, sent after each Welcome, after each verified version and when its
    capacity changes: the rollouts it can hold at once in all, not what is free now.
    """

    actor_id: str
    capacity: int
    incarnation: int
    policy_version: int


class Deliver(Message, frozen=True):
    """One finished trajectory, encoded by `replay.codec`; acknowledged once it is written."""

    actor_id: str
    group_id: int
    sibling: int
    payload: bytes


class LeaseFailed(Message, frozen=True):
    """A rollout that died of infrastructure: time-out, engine abort, shutdown. Never a reward.

    `searches`: those that it had made, their passages best first. `instance`: as in `Hello`, where
    it comes over a new connection before a Hello does.
    """

    actor_id: str
    group_id: int
    sibling: int
    cause: str
    searches: tuple[Search, ...] = ()
    instance: str = ""


class Heartbeat(Message, frozen=True):
    """An actor's gauges, every `replay.heartbeat_s`; in case a message got lost, also its last
    statement and what a Hello would tell.
    """

    actor_id: str
    gauges: dict[str, float]
    ready: Ready | None = None
    held: tuple[tuple[int, int], ...] = ()  # (group_id, sibling)
    delivering: tuple[tuple[int, int], ...] = ()  # (group_id, sibling)


class Goodbye(Message, frozen=True):
    """An actor has drained and leaves."""

    actor_id: str


# ---- replay → actors


class Lease(msgspec.Struct, frozen=True):
    """Permission to roll out one sibling; siblings of a group are leased together to one actor.

    `attempt` counts from 0 the rollouts of this sibling that failed by themselves: the next one has
    other seeds, for the same ones would lead it to the same time-out.
    """

    group_id: int
    sibling: int
    kind: Kind
    question: Question
    sampling: Sampling
    attempt: int = 0


class Welcome(Message, frozen=True):
    """Reply to Hello: taken, on record."""


class Unknown(Message, frozen=True):
    """Reply to an actor that is to say Hello: replay was started again or lost it, has long heard
    from it something else than what is on record, or could not read its message.
    """


class Leases(Message, frozen=True):
    """New leases, all of one or more whole groups (or re-leased siblings)."""

    leases: tuple[Lease, ...]


class Acknowledged(Message, frozen=True):
    """A delivery is on record (`accepted`) or was not needed (`superseded`: an earlier one won;
    `dropped`: the group is gone). After any of the three the actor may forget the trajectory."""

    group_id: int
    sibling: int
    status: str


class Alive(Message, frozen=True):
    """The server's own reply to every Heartbeat: replay lives. Silence means that it does not."""


class Stop(Message, frozen=True):
    """No more leases, or no more batches: drain and leave. To actors and to the learner."""

    cause: str


class Refused(Message, frozen=True):
    """The message was refused, and why. To anybody."""

    cause: str


# ---- learner → replay


class Resume(Message, frozen=True):
    """First message of a learner: its incarnation (higher than any before), the step it starts
    after, and a name drawn by its process, by which a repetition is known.
    """

    incarnation: int
    step: int
    instance: str = ""


class Sample(Message, frozen=True):
    """The learner at step s asks, once, for the batch of step s + 1; replay keeps the question."""

    incarnation: int
    step: int


class SamplePart(Message, frozen=True):
    """The learner asks for a part of the batch of `step`, which does not fit one message."""

    incarnation: int
    step: int
    part: int  # from 0


class Committed(Message, frozen=True):
    """A checkpoint of this step is durable: batches of steps ≤ it are committed."""

    incarnation: int
    step: int


class Evaluate(Message, frozen=True):
    """Evaluate the policy at this step. Idempotent; the reply says how far it is."""

    incarnation: int
    step: int


class Report(Message, frozen=True):
    """The learner's numbers after a step: logged, and shown by the console."""

    incarnation: int
    step: int
    gauges: dict[str, float]


class Finish(Message, frozen=True):
    """The learner has trained its last step and committed it: the run is over."""

    incarnation: int
    cause: str = "completed"


# ---- replay → learner


class Resumed(Message, frozen=True):
    """Reply to Resume: how many recorded batches after `step` come again before new ones."""

    recorded_batches: int


class Batch(Message, frozen=True):
    """Reply to Sample: whole groups for step s + 1, by group id.

    Where their payloads do not fit one message, `groups` is empty and the learner asks for each of
    the `parts`; `sizes` then says how many of the payloads are each group's.
    """

    step: int
    group_ids: tuple[int, ...]
    versions: tuple[int, ...]  # that each group was opened under
    groups: tuple[tuple[bytes, ...], ...]  # trajectories encoded by `replay.codec`
    gauges: dict[str, float]  # replay's own
    fleet: dict[str, dict[str, float]]  # by actor id: its latest gauges
    evaluations: tuple[EvalResult, ...]  # finished since the last Batch
    parts: int = 0
    sizes: tuple[int, ...] = ()


class BatchPart(Message, frozen=True):
    """Reply to SamplePart: the next payloads of the batch's groups, one group after the other."""

    step: int
    part: int
    payloads: tuple[bytes, ...]


class Wait(Message, frozen=True):
    """Reply to Sample: not yet, with who is waited for; the question stays with replay.

    `restored`: to any question, while replay is restored from its log: bytes that are read of it.
    """

    reason: str
    oldest: bool  # True: a batch could be filled but an older unfinished group must come first
    restored: int = 0


class EvalProgress(Message, frozen=True):
    """Reply to Evaluate: how many rollouts are finished, of how many; `result` when all are."""

    done: int
    total: int
    result: EvalResult | None


class Done(Message, frozen=True):
    """Reply to Committed, Report, Finish, Shutdown: taken."""


# ---- launcher → replay


class Observe(Message, frozen=True):
    """The launcher asks how the run stands, and for the reports after these counts."""

    after_step: int
    after_evaluation: int


class Evaluated(msgspec.Struct, frozen=True):
    """A rollout of an evaluation: its question, and its trajectory, encoded."""

    question: Question
    payload: bytes


class Status(Message, frozen=True):
    """Reply to Observe: how the run stands. Of what is asked for, the newest 100 are told;
    `reported` and `evaluated`: how many there are of each in all. `shown`: with evaluations, the
    last rollouts of any that arrived.
    """

    steps: tuple[StepReport, ...]
    evaluations: tuple[EvalResult, ...]
    gauges: dict[str, float]
    fleet: dict[str, dict[str, float]]
    phase: str  # what replay is doing or waiting for, in words
    stop_cause: str  # empty while running
    reported: int = 0
    evaluated: int = 0
    shown: tuple[Evaluated, ...] = ()
    restoring: bool = False  # nothing else is known yet


class Shutdown(Message, frozen=True):
    """The launcher ends the run: replay stops leasing and answers Sample with Stop(cause)."""

    cause: str


# ---- an actor about to join → replay


class Describe(Message, frozen=True):
    """An actor about to join asks what the run is; the server answers at any time."""


class Described(Message, frozen=True):
    """Reply to Describe: the run's resolved configuration, as YAML."""

    config: str


FromActor = Hello | Ready | Deliver | LeaseFailed | Heartbeat | Goodbye
FromLearner = Resume | Sample | SamplePart | Committed | Evaluate | Report | Finish
FromLauncher = Observe | Shutdown
Decided = FromActor | FromLearner | FromLauncher  # by the ledger
Request = Decided | Describe
WithActorKey = FromActor | Describe  # all that its holder may say
ToActor = Welcome | Unknown | Leases | Acknowledged | Alive | Stop | Refused
ToLearner = Resumed | Batch | BatchPart | Wait | EvalProgress | Done | Stop | Refused
Reply = ToActor | ToLearner | Status | Described

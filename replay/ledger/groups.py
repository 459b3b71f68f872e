"""A group: the siblings of one question, who rolls each out, and what has been delivered; and the
failed attempts at each question since it was last answered, which decide when it is given up.

Only `replay.ledger.state` changes a group; decisions are made from its predicates.
"""

from dataclasses import dataclass, field

from replay.log.records import GroupOpened
from replay.log.summary import Summary
from replay.trajectory import Kind, Question

# A rollout was interrupted from outside: replay or its actor went away or was drained, its weights
# did not verify or were too old, the retrieval server was not there, had too much to do, let
# nobody in or had another index. It is made again as it was, with the same seeds.
INTERRUPTED = (
    "not_held",
    "absent",
    "actor_lost",
    "goodbye",
    "shutdown",
    "sampled under version",
    "UnverifiedWeights",
    "RetrievalUnreachable",
    "RetrievalOverloaded",
    "RetrievalDenied",
    "OtherIndex",
)
# A program failed, or made more calls than a record holds.
OF_THE_PROGRAM = ("ProgramFailed", "TooManyCalls")
# A rollout came to nothing by itself, by no fault of its question: it took too long, its engine
# died, a user's tool, environment or program failed.
UNFINISHED = (
    "rollout took over",
    "EngineDead",
    "ToolFailed",
    "EnvironmentFailed",
    *OF_THE_PROGRAM,
)
# However often a lease comes back for these, it says nothing of the question. (Where it does after
# all, the group's deadline counts it.)
NOBODYS_FAULT = (*INTERRUPTED, *UNFINISHED)
FailureKey = tuple[int, str]  # evaluation (-1: training), question id


@dataclass
class Group:
    """The siblings of one question, numbered from 0.

    `holders`: sibling → the actor that rolls it out; a sibling in neither dict is missing.
    `attempts`: sibling → how many of its rollouts failed by themselves. `places`: sibling → the
    number of the record that holds its payload.
    """

    group_id: int
    kind: Kind
    question: Question
    version: int
    opened_at: float
    size: int
    evaluation: int
    holders: dict[int, str] = field(default_factory=dict)
    summaries: dict[int, Summary] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def opened(cls, fact: GroupOpened, size: int) -> "Group":
        """Make a group of `size` siblings of which nothing is leased yet."""
        return cls(
            fact.group_id, fact.kind, fact.question, fact.version, fact.now, size, fact.evaluation
        )

    @property
    def without_payloads(self) -> "Group":
        """The same group without its payloads; `dataclasses.replace` takes five times as long."""
        if not self.payloads:
            return self
        return Group(
            self.group_id,
            self.kind,
            self.question,
            self.version,
            self.opened_at,
            self.size,
            self.evaluation,
            self.holders,
            self.summaries,
            {},
            self.places,
            self.attempts,
        )

    @property
    def closed(self) -> bool:
        """True where every sibling is delivered."""
        return len(self.summaries) == self.size

    @property
    def undelivered(self) -> tuple[int, ...]:
        """The siblings without a trajectory, leased or not."""
        return tuple(i for i in range(self.size) if i not in self.summaries)

    @property
    def short(self) -> bool:
        """True where a sibling is missing; nobody is waited for who has delivered."""
        return len(self.summaries) + len(self.holders) < self.size

    def misses(self, sibling: int) -> bool:
        """Return True if nobody has delivered this sibling and nobody rolls it out."""
        wanted = 0 <= sibling < self.size
        return wanted and sibling not in self.summaries and sibling not in self.holders

    @property
    def missing(self) -> tuple[int, ...]:
        """The siblings to be leased."""
        return tuple(i for i in range(self.size) if self.misses(i))

    def count_attempt(self, sibling: int, cause: str) -> None:
        """Count a rollout that failed, unless it was interrupted from outside."""
        if not cause.startswith(INTERRUPTED):
            self.attempts[sibling] = self.attempts.get(sibling, 0) + 1

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the scorable siblings."""
        found = (summary.reward for summary in self.summaries.values())
        return tuple(reward for reward in found if reward is not None)

    @property
    def has_signal(self) -> bool:
        """True where two scorable siblings differ in reward."""
        return len(set(self.rewards)) > 1

    @property
    def oldest_version(self) -> int:
        """The oldest version among the sampled tokens; the group's own where nothing has come."""
        return min((s.oldest_version for s in self.summaries.values()), default=self.version)

    def describe(self, now: float) -> str:
        """Say who is waited for: `group 17 (version 3, opened 41 s ago) on actor-1: 2 of 8 …`."""
        waited = {self.holders.get(i, "nobody") for i in self.undelivered}
        return (
            f"group {self.group_id} (version {self.version}, opened {now - self.opened_at:.0f} s "
            f"ago) on {', '.join(sorted(waited))}: {len(self.undelivered)} of {self.size} "
            "siblings missing"
        )


@dataclass
class Failures:
    """Failed attempts by question and sibling.

    A question counts apart for training and for each evaluation.
    """

    counts: dict[FailureKey, dict[int, int]] = field(default_factory=dict)

    def of(self, group: Group, sibling: int) -> int:
        """Return how often this sibling of the group's question has failed."""
        return self.counts.get(_key(group), {}).get(sibling, 0)

    def count(self, group: Group, sibling: int, cause: str = "") -> None:
        """Count a failed attempt, unless its cause is nobody's fault."""
        if cause.startswith(NOBODYS_FAULT):
            return
        siblings = self.counts.setdefault(_key(group), {})
        siblings[sibling] = siblings.get(sibling, 0) + 1

    def forgive(self, group: Group) -> None:
        """Forget the failures of a question that was answered, or given up."""
        self.counts.pop(_key(group), None)

    def forget(self, evaluation: int) -> None:
        """Forget the failures of an evaluation that is voided."""
        self.counts = {key: n for key, n in self.counts.items() if key[0] != evaluation}


def _key(group: Group) -> FailureKey:
    return group.evaluation, group.question.id

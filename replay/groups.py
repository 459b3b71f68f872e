"""A group: the siblings of one question, who rolls each out, and what has been delivered.

Consumes the facts about its siblings; produces the predicates that decisions are made of. Changed
only by `replay.books`; waits for nothing.
"""

from dataclasses import dataclass, field

from replay.records import GroupOpened, Summary
from replay.trajectory import Kind, Question

EVAL_SIBLINGS = 2  # greedy, then T = 1


@dataclass
class Group:
    """`holders`: sibling → the actor it is waited from; a sibling in neither dict is missing."""

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

    @classmethod
    def opened(cls, fact: GroupOpened, group_size: int) -> "Group":
        """A group of which nothing is leased yet."""
        size = group_size if fact.kind == "train" else EVAL_SIBLINGS
        return cls(
            fact.group_id, fact.kind, fact.question, fact.version, fact.now, size, fact.evaluation
        )

    @property
    def closed(self) -> bool:
        """Every sibling is delivered."""
        return len(self.summaries) == self.size

    @property
    def undelivered(self) -> tuple[int, ...]:
        """Siblings without a trajectory, leased or not."""
        return tuple(i for i in range(self.size) if i not in self.summaries)

    @property
    def short(self) -> bool:
        """Some sibling is missing; nobody is waited for who has delivered."""
        return len(self.summaries) + len(self.holders) < self.size

    def misses(self, sibling: int) -> bool:
        """Nobody has this sibling and nobody makes it."""
        wanted = 0 <= sibling < self.size
        return wanted and sibling not in self.summaries and sibling not in self.holders

    @property
    def missing(self) -> tuple[int, ...]:
        """Siblings that nobody has and nobody makes: to be leased."""
        return tuple(i for i in range(self.size) if self.misses(i))

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the scorable siblings."""
        found = (summary.reward for summary in self.summaries.values())
        return tuple(reward for reward in found if reward is not None)

    @property
    def has_signal(self) -> bool:
        """Two scorable siblings differ in reward."""
        return len(set(self.rewards)) > 1

    @property
    def all_zero(self) -> bool:
        """Something was scorable, and every reward was 0."""
        return bool(self.rewards) and not any(self.rewards)

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

"""A group: the siblings of one question, who rolls each out, and what has been delivered.

Only `replay.books` changes it; decisions are made of its predicates.
"""

from dataclasses import dataclass, field

from replay.records import GroupOpened
from replay.survey import Summary
from replay.trajectory import Kind, Question

EVAL_SIBLINGS = 2  # greedy, then T = 1


@dataclass
class Group:
    """The siblings of one question, numbered from 0.

    `holders`: sibling → the actor that rolls it out; a sibling in neither dict is missing.
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

    @classmethod
    def opened(cls, fact: GroupOpened, group_size: int) -> "Group":
        """Make a group of which nothing is leased yet."""
        size = group_size if fact.kind == "train" else EVAL_SIBLINGS
        return cls(
            fact.group_id, fact.kind, fact.question, fact.version, fact.now, size, fact.evaluation
        )

    @property
    def closed(self) -> bool:
        """True where every sibling is delivered."""
        return len(self.summaries) == self.size

    @property
    def undelivered(self) -> tuple[int, ...]:
        """Siblings without a trajectory, leased or not."""
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
        """Siblings to be leased."""
        return tuple(i for i in range(self.size) if self.misses(i))

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the scorable siblings."""
        found = (summary.reward for summary in self.summaries.values())
        return tuple(reward for reward in found if reward is not None)

    @property
    def has_signal(self) -> bool:
        """True where two scorable siblings differ in reward."""
        return len(set(self.rewards)) > 1

    @property
    def all_zero(self) -> bool:
        """True where some sibling is scorable, and every reward is 0."""
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

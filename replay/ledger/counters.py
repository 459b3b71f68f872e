"""Replay's own numbers: counts since the run began, means over rollouts since the last batch.

A mean over nothing is left out, not 0.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from replay.ledger.groups import Group
from replay.ledger.streaks import Streaks
from replay.log.summary import Summary

MOST_SEARCHES = 4  # rollouts with this many searches or more are counted together


@dataclass
class BySearches:
    """Counts of train rollouts by number of searches: of all delivered, and of those trained.

    Where the two shares differ, what is trained on is biased: groups that are dropped, or still
    unfinished, are then not like the others.
    """

    delivered: Counter[int] = field(default_factory=Counter)
    trained: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def add(counter: Counter[int], summaries: Iterable[Summary]) -> None:
        """Count these rollouts."""
        counter.update(min(summary.searches, MOST_SEARCHES) for summary in summaries)

    def gauges(self) -> dict[str, float]:
        """Return shares by number of searches, of the whole run so far."""
        return {
            f"replay/{name}_share_searches_{n}": counter[n] / counter.total()
            for name, counter in (("delivered", self.delivered), ("trained", self.trained))
            for n in range(MOST_SEARCHES + 1)
            if counter.total()
        }


@dataclass
class Recent:
    """Sums over train trajectories delivered and train groups closed since the last batch."""

    rollouts: int = 0
    whole: int = 0  # of one sequence
    scored: int = 0
    reward: float = 0.0
    searches: int = 0
    turns: int = 0
    malformed: int = 0
    closed: int = 0
    no_signal: int = 0

    def take(self, summary: Summary) -> None:
        """Count one delivered train trajectory."""
        self.rollouts += 1
        self.whole += summary.sequences == 1
        self.searches += summary.searches
        self.turns += summary.turns
        self.malformed += summary.malformed
        if summary.reward is not None:
            self.scored += 1
            self.reward += summary.reward

    def gauges(self) -> dict[str, float]:
        """Return means, by metric name."""
        ratios = {
            "actor/reward": (self.reward, self.scored),
            "actor/merged_whole": (self.whole, self.rollouts),
            "actor/searches_per_rollout": (self.searches, self.rollouts),
            "actor/malformed_fraction": (self.malformed, self.turns),
            "replay/no_signal_fraction": (self.no_signal, self.closed),
        }
        return {name: above / below for name, (above, below) in ratios.items() if below}


@dataclass
class Counters:
    """Counts of train groups by how they ended, of deliveries not needed and of leases returned."""

    opened: int = 0
    committed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    superseded: int = 0
    returned: int = 0
    streaks: Streaks = field(default_factory=Streaks)
    recent: Recent = field(default_factory=Recent)
    by_searches: BySearches = field(default_factory=BySearches)

    def deliver(self, summary: Summary) -> None:
        """Count one delivered train trajectory."""
        self.recent.take(summary)
        self.by_searches.add(self.by_searches.delivered, [summary])

    def sample(self, groups: Iterable[Group]) -> None:
        """Count the groups of a step; means start again."""
        for group in groups:
            self.by_searches.add(self.by_searches.trained, group.summaries.values())
        self.recent = Recent()

    def close(self, group: Group) -> None:
        """Count a train group whose last sibling has come."""
        self.recent.closed += 1
        self.recent.no_signal += not group.has_signal
        self.streaks.close(group.rewards)

    def gauges(self) -> dict[str, float]:
        """Return counts and recent means, by metric name."""
        counts = {
            "replay/opened_groups": self.opened,
            "replay/committed_groups": self.committed,
            "replay/superseded": self.superseded,
            "replay/leases_returned": self.returned,
            **{f"replay/dropped_{cause}": n for cause, n in sorted(self.dropped.items())},
        }
        totals = {name: float(n) for name, n in counts.items()}
        return totals | self.recent.gauges() | self.by_searches.gauges()

"""Replay's own numbers: counts since the run began, means over rollouts since the last batch.

Consumes facts; produces `gauges() -> dict[str, float]`. A mean over nothing is left out, not 0.
"""

from collections import Counter
from dataclasses import dataclass, field

from replay.groups import Group
from replay.records import Summary


@dataclass
class Recent:
    """Sums over train trajectories delivered and train groups closed since the last batch."""

    rollouts: int = 0
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
        self.searches += summary.searches
        self.turns += summary.turns
        self.malformed += summary.malformed
        if summary.reward is not None:
            self.scored += 1
            self.reward += summary.reward

    def gauges(self) -> dict[str, float]:
        """Means, by metric name."""
        ratios = {
            "actor/reward": (self.reward, self.scored),
            "actor/searches_per_rollout": (self.searches, self.rollouts),
            "actor/malformed_fraction": (self.malformed, self.turns),
            "replay/no_signal_fraction": (self.no_signal, self.closed),
        }
        return {name: above / below for name, (above, below) in ratios.items() if below}


@dataclass
class Tally:
    """Counts of train groups by how they ended, of deliveries not needed and of leases returned.

    `zero_streak` is how many train groups closed in a row with nothing but reward 0.
    """

    opened: int = 0
    committed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    superseded: int = 0
    returned: int = 0
    zero_streak: int = 0
    recent: Recent = field(default_factory=Recent)

    def close(self, group: Group) -> None:
        """Count a train group whose last sibling has come."""
        self.recent.closed += 1
        self.recent.no_signal += not group.has_signal
        self.zero_streak = self.zero_streak + 1 if group.all_zero else 0

    def gauges(self) -> dict[str, float]:
        """Counts and recent means, by metric name."""
        counts = {
            "replay/opened_groups": self.opened,
            "replay/committed_groups": self.committed,
            "replay/superseded": self.superseded,
            "replay/leases_returned": self.returned,
            **{f"replay/dropped_{cause}": n for cause, n in sorted(self.dropped.items())},
        }
        return {name: float(n) for name, n in counts.items()} | self.recent.gauges()

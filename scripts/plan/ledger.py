"""Replay's rules in a simulation: which groups may be opened, and which make the next batch.

Admission is replay's own function. The order rule is too, but for how it is reckoned: replay looks
at every group, this at how many there are of each version, since ten thousand are open at once. A
test holds the two against each other.
"""

from collections import Counter
from collections.abc import Mapping
from heapq import heappop, heappush

from replay.ledger.admission import Bounds, can_open
from scripts.plan.engine import Group
from scripts.plan.scenario import Rules


class Ledger:
    """Groups from their opening to their batch. `admitted`: open, ready or sampled."""

    def __init__(self, rules: Rules) -> None:
        self._bounds = Bounds(rules.groups_per_step, rules.max_staleness)
        self._ready: list[tuple[int, int, Group]] = []
        self._waiting: Counter[int] = Counter()  # unfinished and ready groups by version
        self._ready_by: Counter[int] = Counter()
        self.admitted = self.opened = 0

    @property
    def ready(self) -> int:
        """Groups that wait for the learner."""
        return len(self._ready)

    def may_open(self, version: int) -> bool:
        """Return True if an engine that serves this version may begin another group."""
        return can_open(self.admitted, version, self._bounds)

    def open(self, version: int, size: int) -> Group:
        """Open a group."""
        self.admitted += 1
        self.opened += 1
        self._waiting[version] += 1
        return Group(self.opened, version, size)

    def close(self, group: Group) -> None:
        """Take in a group whose siblings have all been delivered."""
        self._ready_by[group.version] += 1
        heappush(self._ready, (group.version, group.number, group))

    def drop(self, group: Group) -> None:
        """Forget a group of which there is nothing to learn: another may be opened for it."""
        self.admitted -= 1
        self._less(self._waiting, group.version, 1)

    def batch(self, step: int) -> list[Group] | None:
        """The batch for a learner that has completed `step`: the oldest version first. None where
        too few are ready; empty where there are enough, and an unfinished older group comes first.
        """
        wanted = self._bounds.groups_per_step
        if len(self._ready) < wanted:
            return None
        taken, left = Counter[int](), wanted
        for version in sorted(self._ready_by):
            taken[version] = min(left, self._ready_by[version])
            left -= taken[version]
        behind = {v: count - taken[v] for v, count in self._waiting.items()}
        if not can_pass(behind, step, self._bounds):
            return []
        for version, count in taken.items():
            self._less(self._waiting, version, count)
            self._less(self._ready_by, version, count)
        return [heappop(self._ready)[2] for _ in range(wanted)]

    @staticmethod
    def _less(counts: Counter[int], version: int, by: int) -> None:
        counts[version] -= by
        if not counts[version]:
            del counts[version]


def can_pass(behind: Mapping[int, int], step: int, bounds: Bounds) -> bool:
    """`replay.ledger.admission.can_pass`, of how many groups of each version are left behind."""
    count = 0
    for version in sorted(behind):
        count += behind[version]
        room = max(0, version + bounds.max_staleness - step) * bounds.groups_per_step
        if behind[version] and count > room:
            return False
    return True

"""Streaks of closed train groups that leave nothing to learn from, and of rollouts that a program
fails; and the end of a run by them.

After 10 steps' worth of groups with nothing but reward 0 there is no gradient left and no way back;
after 4 that nobody could score, and none before them, the scoring is broken; after 4 steps' worth
of rollouts that their program failed in, and none delivered among them, the program is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ZERO_STEPS = 10
UNSCORED_STEPS = 4
FAILED_STEPS = 4


@dataclass
class Streaks:
    """`zero`: how many groups closed in a row with nothing but reward 0; `unscored`: how many
    without any reward before the first that had one (`scored`); `failed`: how many rollouts their
    program failed in since the last delivery.
    """

    zero: int = 0
    unscored: int = 0
    scored: bool = False
    failed: int = 0

    def close(self, rewards: Sequence[float]) -> None:
        """Count a group by the rewards of its scorable siblings."""
        self.scored |= bool(rewards)
        self.unscored += not self.scored
        self.zero = self.zero + 1 if rewards and not any(rewards) else 0

    def end(self, groups_per_step: int, why: str) -> str:
        """The cause by which the run ends, '' while it goes on; `why`: the last group's, where it
        could not be scored.
        """
        if self.zero >= (limit := ZERO_STEPS * groups_per_step):
            return f"the last {limit} closed train groups all had reward 0: no gradient"
        if not self.scored and self.unscored >= (limit := UNSCORED_STEPS * groups_per_step):
            return f"none of the first {limit} closed train groups could be scored: {why}"
        return ""

    def failing(self, rollouts: int, why: str) -> str:
        """The cause by which a run with so many rollouts a step ends, '' while it goes on; `why`:
        the last one's.
        """
        if self.failed >= (limit := FAILED_STEPS * rollouts):
            return f"the program failed in {limit} rollouts, and none came between them: {why}"
        return ""

    def restart(self) -> None:
        """Count anew: somebody has mended it, perhaps."""
        self.zero = self.unscored = self.failed = 0

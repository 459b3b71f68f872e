"""How many rollouts an engine's keys and values hold at once, found while it works. Pure.

Sought are as many as run without one driving another's context out of the cache: a request that is
preempted is prefilled again, and so is a turn whose prefix was evicted since the turn before.
Looked at are *windows*: as many rollouts end in one as may be in flight, so that contexts of every
length were there. Failed and timed-out rollouts fill a window too, but only to lower it: perhaps
they failed before their contexts were long. An update empties the cache, and what ran fills it
again as it was: use of before and after counts alike, and what it preempts is no preemption.

- peak use of the cache below `GROW_BELOW`, all leased, and no queue for a seat: more, to `AIM`;
- up to `HOLD_TO`: as it is; above: less, to `AIM`;
- a preemption that is no update's: less at once, and not more again for `PATIENCE` rollouts.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

GROW_BELOW, AIM, HOLD_TO = 0.90, 0.935, 0.97  # of the cache's blocks, in use
LARGEST_STEP = 1.25
PATIENCE = 1000  # rollouts
MOST = 4096  # where nobody has set it


def mean_context(prompt_tokens: int, longest: int) -> int:
    """A context's tokens on average, as far as is known before: half way from prompt to limit."""
    return (prompt_tokens + longest) // 2


class Load(NamedTuple):
    """An engine's load over some of its steps."""

    peak_use: float = 0.0  # of the cache's blocks
    preemptions: int = 0  # without those of updates
    steps: int = 0
    queued_steps: int = 0  # in which a request waited: for a seat, or for blocks

    def and_then(self, later: "Load") -> "Load":
        """Both, one after the other."""
        return Load(
            max(self.peak_use, later.peak_use),
            self.preemptions + later.preemptions,
            self.steps + later.steps,
            self.queued_steps + later.queued_steps,
        )


@dataclass
class Capacity:
    """The rollouts that may be in flight: `now`, from `least` (a group) to `most`."""

    now: int
    least: int
    most: int

    @classmethod
    def of(cls, kv_tokens: int, context_tokens: int, seats: int, least: int, most: int) -> Self:
        """Start with as many contexts of a mean length as the cache holds, each with a seat.

        `most` is 0 where nobody has set it.
        """
        most = max(least, most or MOST)
        start = min(kv_tokens // max(1, context_tokens), seats)
        return cls(min(max(start, least), most), least, most)

    def __post_init__(self) -> None:
        self._window, self._delivered, self._ended, self._leased = Load(), 0, 0, 0
        self._settling = 0  # rollouts to end before the next window
        self._ceiling, self._calm = self.most, 0

    def observe(self, load: Load, delivered: int, in_flight: int, failed: int = 0) -> bool:
        """Take in the load and how many rollouts were delivered and failed since the last call, and
        how many are in flight; return True if `now` has changed by it.
        """
        before, ended = self.now, delivered + failed
        self._calm += ended
        if self._settling > 0:
            self._settling -= ended
            return False
        self._window = self._window.and_then(load)
        self._delivered, self._ended = self._delivered + delivered, self._ended + ended
        self._leased = max(self._leased, in_flight)
        if self._window.preemptions:
            self._back_off()
        elif self._delivered >= self.now or (
            self._ended >= self.now and self._window.peak_use > HOLD_TO
        ):
            self._adjust()
        return self.now != before

    def _back_off(self) -> None:
        share = self._window.preemptions / self.now
        kept = max(1 / LARGEST_STEP, 1.0 - share / 2)
        self._set(min(self.now - 1, int(self.now * kept)))
        self._ceiling, self._calm, self._settling = self.now, 0, self.now

    def _adjust(self) -> None:
        peak, target = self._window.peak_use, self.now
        if peak > HOLD_TO:
            target = min(self.now - 1, int(self.now * AIM / peak))
        elif peak < GROW_BELOW and self._all_leased and self._seats_free:
            if self._calm >= PATIENCE:
                self._ceiling = self.most
            grown = int(self.now * min(LARGEST_STEP, AIM / max(peak, AIM / LARGEST_STEP)))
            target = min(max(grown, self.now + 1), self._ceiling)
        self._set(target)

    @property
    def _all_leased(self) -> bool:
        """True where replay had no group to give more, for want of capacity."""
        return self._leased > self.now - self.least

    @property
    def _seats_free(self) -> bool:
        return 2 * self._window.queued_steps < self._window.steps

    def _set(self, value: int) -> None:
        self.now = min(max(value, self.least), self.most)
        self._window, self._delivered, self._ended, self._leased = Load(), 0, 0, 0

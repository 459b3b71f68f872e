"""How fast the index is, and what follows from it: how large a batch is, and who may wait.

Pure but for the sums of `Fit`. Loads are queries; a long one counts as several.
"""

import math
from typing import NamedTuple

SHARE = 0.8  # of what is left until its deadline: a search is let in that needs no more
BATCHES = 8  # of the largest size, within the server's deadline
_KEPT = 0.9  # of a batch's weight at the next one
_ORIGIN = 0.05  # weight of a batch of nothing, in no time
_SURPRISE = 4.0  # times what was expected, at most, that one batch may tell


class Pace(NamedTuple):
    """A batch of n takes `fixed_s + n · each_s` seconds."""

    fixed_s: float
    each_s: float

    def seconds(self, load: float, batch: int) -> float:
        """Seconds that a load takes in batches of at most `batch`."""
        return math.ceil(load / batch) * self.fixed_s + load * self.each_s


class Fit:
    """The pace of recent batches, by least squares; each weighs `_KEPT` of the one after it.

    The origin is taken as a batch too, lightly: so batches that are all of one size are taken to
    tell what a query takes, and no cost of a batch alone.
    """

    def __init__(self) -> None:
        self._batches = self._loads = self._seconds = self._squares = self._products = 0.0
        self.pace: Pace | None = None

    def add(self, load: int, seconds: float) -> None:
        """Take in a batch. One far slower than expected counts less: it may be an accident."""
        if self.pace is not None:
            seconds = min(seconds, _SURPRISE * self.pace.seconds(load, load))
        self._batches = _KEPT * self._batches + 1.0
        self._loads = _KEPT * self._loads + load
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + load * load
        self._products = _KEPT * self._products + load * seconds
        self.pace = self._fitted()

    def _fitted(self) -> Pace:
        weight = self._batches + _ORIGIN
        spread = self._squares - self._loads**2 / weight
        each_s = (self._products - self._loads * self._seconds / weight) / spread
        fixed_s = (self._seconds - each_s * self._loads) / weight
        if each_s < 0.0:
            return Pace(self._seconds / self._batches, 0.0)
        if fixed_s < 0.0:
            return Pace(0.0, self._seconds / self._loads)
        return Pace(fixed_s, each_s)


def batch_size(pace: Pace | None, deadline_s: float, most: int) -> int:
    """The load of a batch: what takes a part of the deadline, or longer where a batch costs much
    by itself; one query while nothing is known.
    """
    if pace is None:
        return 1
    seconds = max(deadline_s / BATCHES, 2 * pace.fixed_s) - pace.fixed_s
    return max(1, min(most, int(seconds / pace.each_s))) if pace.each_s * most > seconds else most


def late_s(pace: Pace, running_s: float, load: float, batch: int, left_s: float) -> float:
    """By how many seconds a search is too late to be let in, 0 or less: it is in time.

    `running_s`: what the batch under way still takes; `load`: of all that waits, its own included.
    """
    return running_s + pace.seconds(load, batch) - SHARE * left_s

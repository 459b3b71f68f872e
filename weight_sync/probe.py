"""The distance of an engine's log-probs from the learner's on the probe's tokens, and its bound.

Learner and engine compute the same weights by other kernels, in bf16 often 0.1 nats apart on single
tokens. How far is measured where the engine still holds the weights that it loaded from
`model.path` itself, and nothing can have gone wrong in a sync: the *start*. Later versions may
differ by `FACTOR` times as much. Mean and quantile are judged; the largest, which is noise, is only
reported. Bytes and loads are checked exactly elsewhere (digest, checksum). Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

QUANTILE = 0.9
FACTOR = 5.0
QUANTILE_OVER_MEAN = 4.0  # of the smallest bounds; 2.3 where distances are exponential
START_LIMIT = 0.5  # mean, in nats: beyond it, one side computes another model


class Distance(NamedTuple):
    """|difference of log-probs| over the probe's tokens, in nats."""

    mean: float
    quantile: float
    largest: float

    def __str__(self) -> str:
        return f"mean {self.mean:.3g}, p90 {self.quantile:.3g}, largest {self.largest:.3g}"


UNKNOWN = Distance(float("nan"), float("nan"), float("nan"))
NEVER = Distance(float("inf"), float("inf"), float("inf"))  # no answer came


class Bound(NamedTuple):
    """The largest mean and quantile that a version may have."""

    mean: float
    quantile: float

    def admits(self, distance: Distance) -> bool:
        """True where both are kept; never for NaN."""
        return distance.mean <= self.mean and distance.quantile <= self.quantile

    def __str__(self) -> str:
        return f"mean {self.mean:.3g}, p90 {self.quantile:.3g}"


def distance(engine: NDArray[np.float32], learner: Sequence[float]) -> Distance:
    """The distance of float32[n] log-probs from the learner's. Raises ValueError for other n."""
    expected = np.asarray(learner, dtype=np.float32)
    if engine.shape != expected.shape:
        raise ValueError(f"{engine.shape[0]} log-probs of the engine, {expected.shape[0]} expected")
    apart = np.abs(engine - expected).astype(np.float64)
    if not apart.size:
        return Distance(0.0, 0.0, 0.0)
    return Distance(float(apart.mean()), float(np.quantile(apart, QUANTILE)), float(apart.max()))


def bound(
    tolerance: float,
    start: Distance | None = None,
    start_logprobs: Sequence[float] = (),
    logprobs: Sequence[float] = (),
) -> Bound:
    """The bound of a version: `tolerance` (mean, nats) at least, and `FACTOR` times the start's.

    Rounding grows with the numbers rounded: a version whose log-probs are larger than the start's
    (mean |log-prob|) may differ by as much more.
    """
    least = Bound(tolerance, QUANTILE_OVER_MEAN * tolerance)
    if start is None:
        return least
    grown = 1.0
    if before := float(np.mean(np.abs(start_logprobs))):
        grown = max(1.0, float(np.mean(np.abs(logprobs))) / before)
    return Bound(
        max(least.mean, FACTOR * grown * start.mean),
        max(least.quantile, FACTOR * grown * start.quantile),
    )

"""Intervals of means over questions: Efron's percentile bootstrap (1979). Pure."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
DRAWN_AT_ONCE = 1 << 19  # values
COUNT_COST = 8  # of a value's count, in draws of one value
LEVEL = 0.95
Means = NDArray[np.float64]  # [RESAMPLES], of resampled questions


def resampled_means(values: Sequence[float], key: str) -> Means:
    """Means of RESAMPLES resamples; `key` seeds them.

    Few distinct values are drawn by their counts, many one by one: whichever is fewer draws. What
    is drawn at once stays within a few MB.
    """
    seed = hashlib.blake2b(key.encode(), digest_size=8).digest()
    chance = np.random.default_rng(int.from_bytes(seed))
    all_values = np.sort(np.asarray(values, np.float64))
    distinct, counts = np.unique(all_values, return_counts=True)
    number = len(all_values)

    def drawn(resamples: int) -> Means:
        if len(distinct) * COUNT_COST <= number or len(distinct) == 1:
            shares = counts / number
            means: Means = chance.multinomial(number, shares, size=resamples) @ distinct / number
        else:
            which = chance.integers(number, size=(resamples, number), dtype=np.uint32)
            means = all_values[which].mean(axis=1)
        return means

    at_once = max(1, DRAWN_AT_ONCE // number)
    sizes = [min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once)]
    return np.concatenate([drawn(size) for size in sizes])


def pooled(means: Sequence[Means], weights: Sequence[float]) -> Means:
    """The weighted mean of several sets, each resampled on its own."""
    return np.asarray(np.average(np.stack(means), axis=0, weights=weights), np.float64)


def interval(means: Means) -> tuple[float, float]:
    """The percentile interval at LEVEL."""
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(means, (tail, 1.0 - tail))
    return float(low), float(high)

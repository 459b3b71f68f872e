"""Means, their intervals, and what several samples of a question are worth. Pure.

Questions are what varies: where one was asked several times, its value is the mean over them. The
intervals are of Efron's percentile bootstrap (1979); pass@k is the unbiased estimate of Chen et al.
(2021, arXiv 2107.03374, equation 1).
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95
Means = NDArray[np.float64]  # [RESAMPLES], of resampled questions


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """How likely one of k samples is correct, when `correct` of `samples` were: 1 − C(n − c, k) /
    C(n, k). Raises ValueError unless 1 ≤ k ≤ n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k!r}: there are {samples!r} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def resampled_means(values: Sequence[float], key: str) -> Means:
    """The means of so many resamples of `values`, drawn with replacement; `key` seeds them.

    A resample is drawn as how often it holds each of the distinct values, which is the same
    distribution and takes memory for those alone.
    """
    distinct, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    drawn = _random(key).multinomial(len(values), counts / len(values), size=RESAMPLES)
    means: Means = drawn @ distinct / len(values)
    return means


def pooled(means: Sequence[Means], weights: Sequence[float]) -> Means:
    """The weighted mean of several sets, each resampled for itself."""
    average: Means = np.average(np.stack(means), axis=0, weights=weights)
    return average


def interval(means: Means) -> tuple[float, float]:
    """The percentile interval at LEVEL."""
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(means, (tail, 1.0 - tail))
    return float(low), float(high)


def percentile(values: Sequence[float], fraction: float) -> float:
    """That quantile, between neighbours where it falls there; 0 without values."""
    return float(np.quantile(values, fraction)) if values else 0.0


def _random(key: str) -> np.random.Generator:
    seed = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed))

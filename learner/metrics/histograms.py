"""Histograms of a step: rewards of its rollouts, staleness and behaviour ratios of its tokens.

Each has few bars, whatever the size of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.batch import TrainingBatch
from learner.health.diagnostics import RATIO_BARS

REWARD_BARS = 32


@dataclass(frozen=True)
class Histogram:
    """Bars side by side: bar i lies between edges i and i + 1, in rising order."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]


def histograms(
    shares: Sequence[TrainingBatch], gauges: Mapping[str, float]
) -> dict[str, Histogram]:
    """What a step's shares and gauges tell, by tag; without what it has nothing of."""
    found = {
        "histogram/reward": rewards(shares),
        "histogram/staleness": staleness(shares),
        "histogram/behaviour_ratio": ratios(gauges),
    }
    return {tag: histogram for tag, histogram in found.items() if histogram}


def rewards(shares: Sequence[TrainingBatch]) -> Histogram | None:
    """Of the step's rollouts, without the unscorable."""
    flat = np.array([reward for group in shares[0].rewards for reward in group], np.float64)
    if not len(known := flat[np.isfinite(flat)]):
        return None
    counts, edges = np.histogram(known, REWARD_BARS)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def staleness(shares: Sequence[TrainingBatch]) -> Histogram | None:
    """Of the step's action tokens, a bar a step."""
    micro_batches = [micro for share in shares for micro in share.micro_batches]
    steps = [micro.staleness[micro.loss_mask] for micro in micro_batches]
    counts = torch.bincount(torch.cat(steps).long()).tolist()
    edges = tuple(step - 0.5 for step in range(len(counts) + 1))
    return Histogram(edges, tuple(counts)) if counts else None


def ratios(gauges: Mapping[str, float]) -> Histogram | None:
    """Of the action tokens whose behaviour log-prob is known, before the update."""
    shares = [gauges.get(f"learner/ratio_tokens_{bar}") for bar in RATIO_BARS]
    if None in shares:
        return None
    tokens = gauges["learner/action_tokens"] - gauges["learner/masked_tokens"]
    lows = [low for low, _ in RATIO_BARS.values()]
    last = max(2.0 * lows[-1], gauges["learner/behaviour_ratio_max"])
    return Histogram((*lows, last), tuple(tokens * (share or 0.0) for share in shares))

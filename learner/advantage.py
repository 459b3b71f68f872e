"""Group-relative advantages: each sibling's reward against its group's mean.

GRPO, arXiv 2402.03300. Consumes the rewards of one whole group. Pure; nothing else derives credit.
"""

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6


def group_advantages(rewards: Tensor, std: Literal["none", "group"]) -> Tensor:
    """A_i = R_i − mean(R), divided by (s + 1e-6) when `std` is "group"; s is Bessel-corrected.

    rewards: float[n], NaN = unscorable, left out of mean and s and given advantage 0. Returns
    float[n]. A group of one, or of equal rewards, carries no signal: exactly 0 (verl gives a group
    of one A = R). Raises ValueError on another `std` or shape.
    """
    if std not in ("none", "group"):
        raise ValueError(f"advantage std must be 'none' or 'group', got {std!r}")
    if rewards.ndim != 1:
        raise ValueError(f"rewards must be float[n], got shape {list(rewards.shape)!r}")
    scorable = ~rewards.isnan()
    scored = rewards[scorable]
    advantages = torch.zeros_like(rewards)
    if len(scored) < 2 or bool(scored.min() == scored.max()):
        return advantages
    centred = scored - scored.mean()
    if std == "group":
        centred = centred / (scored.std(correction=1) + EPSILON)
    advantages[scorable] = centred
    return advantages

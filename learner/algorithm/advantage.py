"""Group-relative advantages: each sibling's reward against its group's baseline.

GRPO, arXiv 2402.03300; leave-one-out: RLOO, arXiv 2402.14740; std over the batch: ScaleRL, arXiv
2510.13786. Nothing else derives credit.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6
Baseline = Literal["mean", "leave_one_out"]
Std = Literal["none", "group", "batch", "whiten"]


def advantages(
    groups: Sequence[Tensor], baseline: Baseline, std: Std, epsilon: float = EPSILON
) -> list[Tensor]:
    """Each group's float[n] advantages: (R − baseline), divided by (s + epsilon) unless `std` is
    "none".

    groups: float[n] rewards each, NaN = unscorable: left out of baseline and s, and given 0. The
    baseline is the group's mean, or the mean of the *other* siblings. s is Bessel-corrected, of the
    group's rewards, or ("batch") of all rewards of the step, each less its group's mean. A group of
    one, or of equal rewards, carries no signal: exactly 0 (verl gives a group of one A = R). Raises
    ValueError on an unknown baseline or std, or rewards of another shape.
    """
    _check(groups, baseline, std)
    centred = [_centred(rewards, baseline) for rewards in groups]
    if std == "group":
        return [c / (_spread(r) + epsilon) for c, r in zip(centred, groups, strict=True)]
    if std == "batch" and groups:
        spread = _spread(torch.cat([_centred(r, "mean")[~r.isnan()] for r in groups]))
        return [c / (spread + epsilon) for c in centred]
    return centred


def _check(groups: Sequence[Tensor], baseline: str, std: str) -> None:
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"learner.baseline = {baseline!r}: one of 'mean', 'leave_one_out'")
    if std not in ("none", "group", "batch"):
        raise ValueError(f"learner.advantage_std = {std!r}: one of 'none', 'group', 'batch'")
    for rewards in groups:
        if rewards.ndim != 1:
            raise ValueError(f"rewards must be float[n], got shape {list(rewards.shape)!r}")


def _centred(rewards: Tensor, baseline: Baseline) -> Tensor:
    scorable = ~rewards.isnan()
    scored = rewards[scorable]
    result = torch.zeros_like(rewards)
    # Equal rewards minus their mean may be off zero by rounding: decided by comparison instead.
    if len(scored) < 2 or bool(scored.min() == scored.max()):
        return result
    centred = scored - scored.mean()
    if baseline == "leave_one_out":
        centred = centred * len(scored) / (len(scored) - 1)
    result[scorable] = centred
    return result


def _spread(rewards: Tensor) -> Tensor:
    scored = rewards[~rewards.isnan()]
    return scored.std(correction=1) if len(scored) > 1 else torch.ones_like(rewards.sum())

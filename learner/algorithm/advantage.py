"""Advantages of rollouts: each sibling's reward against its group's baseline, or against all.

GRPO, arXiv 2402.03300; leave-one-out: RLOO, arXiv 2402.14740; std over the batch: ScaleRL, arXiv
2510.13786; whitened over the tokens, with or without a group's baseline: REINFORCE++, arXiv
2501.03262; the baseline of least variance off-policy: VCPO, arXiv 2602.17616. A critic's credit is
in `gae`, a turn's in `turns`.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

EPSILON = 1e-6
VARIANCE_FLOOR = 1e-8  # of what is whitened
Baseline = Literal["mean", "leave_one_out", "optimal", "none"]
Std = Literal["none", "group", "batch", "whiten"]


def advantages(
    groups: Sequence[Tensor],
    baseline: Baseline,
    std: Std,
    epsilon: float = EPSILON,
    tokens: Sequence[Tensor] = (),
    log_ratios: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Each group's float[n] advantages: (R − baseline), divided by (s + epsilon) unless `std` is
    "none", or whitened ("whiten"). Each group's rollouts have so many `tokens`, int[n], and log
    ratios of current to behaviour policy, float[n] (none: 0); "whiten" and "optimal" need these.

    groups: float[n] rewards each, NaN = unscorable: left out of baseline and s, and given 0. The
    baseline is the group's mean, the mean of the *other* siblings, `optimal`'s, or nothing. s is
    Bessel-corrected, of the group's rewards, or ("batch") of all rewards of the step, each less its
    group's mean. With a baseline, a group of one, or of equal rewards, carries no signal: exactly 0
    before whitening (verl gives a group of one A = R). Raises ValueError on an unknown baseline or
    std, or rewards of another shape.
    """
    _check(groups, baseline, std)
    if baseline == "optimal":
        log_ratios = log_ratios or [torch.zeros_like(rewards) for rewards in groups]
        told = zip(groups, tokens, log_ratios, strict=True)
        centred = [_centred(each[0], baseline, optimal(*each)) for each in told]
    else:
        centred = [_centred(rewards, baseline) for rewards in groups]
    if std == "group":
        return [c / (_spread(r) + epsilon) for c, r in zip(centred, groups, strict=True)]
    if std == "whiten":
        counts = [count * ~r.isnan() for count, r in zip(tokens, groups, strict=True)]
        return whiten(centred, counts)
    if std == "batch" and groups:
        spread = _spread(torch.cat([_centred(r, "mean")[~r.isnan()] for r in groups]))
        return [c / (spread + epsilon) for c in centred]
    return centred


def optimal(rewards: Tensor, tokens: Tensor, log_ratios: Tensor) -> Tensor:
    """The baseline of least variance where rollout i was sampled by another policy, a scalar:

        b = Σ w_i² |g_i|² R_i / Σ w_i² |g_i|²

    w is the rollout's ratio of current to behaviour policy (untruncated), g the gradient of its
    log-likelihood (VCPO, arXiv 2602.17616). |g_i|² is taken to be in proportion to its tokens, as
    if their gradients were orthogonal and of one length (OPO, arXiv 2505.23585, which this is with
    w = 1): VCPO measures it, by a backward pass for each rollout.
    """
    scorable = ~rewards.isnan()
    scored, counts, logs = rewards[scorable], tokens[scorable], log_ratios[scorable]
    # A common factor changes nothing: so no ratio overflows.
    weights = counts * torch.softmax(2.0 * logs, dim=0)
    return (weights * scored).sum() / weights.sum()


def whiten(groups: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Tensor]:
    """`whitened` by mean and variance (Bessel-corrected) over the tokens of all rollouts, of which
    int[n] each group's have so many; rollouts without any get 0.
    """
    values, counts = torch.cat(list(groups)), torch.cat(list(tokens)).to(groups[0])
    total = counts.sum().clamp(min=1.0)
    mean = (counts * values).sum() / total
    variance = (counts * (values - mean).square()).sum() / (total - 1.0).clamp(min=1.0)
    white = whitened(values, counts > 0, mean=float(mean), variance=float(variance))
    return list(white.split([len(group) for group in groups]))


def whitened(values: Tensor, mask: Tensor, *, mean: float, variance: float) -> Tensor:
    """(A − mean) / √(variance + 1e-8) on the mask, 0 off it."""
    scale = (variance + VARIANCE_FLOOR) ** 0.5
    return torch.where(mask, (values - mean) / scale, 0.0)


def _check(groups: Sequence[Tensor], baseline: str, std: str) -> None:
    for field, name, kind in (("baseline", baseline, Baseline), ("advantage_std", std, Std)):
        if name not in (known := get_args(kind)):
            raise ValueError(f"learner.{field} = {name!r}: one of {', '.join(map(repr, known))}")
    for rewards in groups:
        if rewards.ndim != 1:
            raise ValueError(f"rewards must be float[n], got shape {list(rewards.shape)!r}")


def _centred(rewards: Tensor, baseline: Baseline, value: Tensor | None = None) -> Tensor:
    """R − baseline, 0 where there is no signal; `value`: the baseline of "optimal"."""
    scorable = ~rewards.isnan()
    scored = rewards[scorable]
    result = torch.zeros_like(rewards)
    if baseline == "none":
        return torch.where(scorable, rewards, result)
    # Equal rewards minus their mean may be off zero by rounding: decided by comparison instead.
    if len(scored) < 2 or bool(scored.min() == scored.max()):
        return result
    centred = scored - (scored.mean() if value is None else value)
    if baseline == "leave_one_out":
        centred = centred * len(scored) / (len(scored) - 1)
    result[scorable] = centred
    return result


def _spread(rewards: Tensor) -> Tensor:
    scored = rewards[~rewards.isnan()]
    return scored.std(correction=1) if len(scored) > 1 else torch.ones_like(rewards.sum())

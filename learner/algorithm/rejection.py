"""Rejection: what is left out because the policy that sampled it is too far away.

x = numerator − denominator is the logarithm of a token's behaviour ratio, as in `importance`. A
token that is rejected gets weight 0 and stays in the denominator of the loss. The statistics:

    k2 = x² / 2      k3 = e^x − 1 − x      k1 = −x
    binary KL = max(KL(p ‖ q), KL(q ‖ p)) of "this token, or any other", p and q its probabilities

k2, k3 and their mean and maximum over a sequence: verl's rollout correction. Off-policy sequence
masking (OPSM): DeepSeek-V3.2, arXiv 2512.02556, which rejects where the advantage is negative
alone. Binary KL of a token: KPop (Ring-2.6; AReaL).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from learner.algorithm.importance import LOG_RATIO_LIMIT, sequence_means, sequence_sums

# Of float32[N] log-probs of the two policies.
Statistic = Callable[[Tensor, Tensor], Tensor]


class Rejection(NamedTuple):
    """What is bounded, over what, and whether negative advantages alone are rejected."""

    statistic: Statistic
    over: Literal["token", "mean", "max"]
    of_negative: bool = False


def k1(numerator: Tensor, denominator: Tensor) -> Tensor:
    """−x: how much likelier the token was where it was sampled."""
    return denominator - numerator


def k2(numerator: Tensor, denominator: Tensor) -> Tensor:
    """x² / 2."""
    return (numerator - denominator).square() / 2


def k3(numerator: Tensor, denominator: Tensor) -> Tensor:
    """e^x − 1 − x, x clamped to ±20."""
    x = (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return x.expm1() - x


def binary_kl(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The larger of both divergences between the two policies' odds of this very token."""
    p, q = (lp.double().clamp(-LOG_RATIO_LIMIT, -1e-12) for lp in (numerator, denominator))
    rest_p, rest_q = (-p.expm1()).log(), (-q.expm1()).log()
    forward = p.exp() * (p - q) - p.expm1() * (rest_p - rest_q)
    backward = q.exp() * (q - p) - q.expm1() * (rest_q - rest_p)
    return torch.maximum(forward, backward)


# By the name that `learner.rejection` gives them.
REJECTIONS: dict[str, Rejection] = {
    "mean_k2": Rejection(k2, "mean"),
    "mean_k3": Rejection(k3, "mean"),
    "max_k2": Rejection(k2, "max"),
    "max_k3": Rejection(k3, "max"),
    "binary_kl": Rejection(binary_kl, "token"),
    "opsm": Rejection(k1, "mean", of_negative=True),
}


def accepted(
    name: str,
    bound: float,
    *,
    numerator: Tensor,
    denominator: Tensor,
    advantages: Tensor,
    rows: Tensor,
    usable: Tensor,
) -> Tensor:
    """bool[N]: the tokens whose statistic, or their sequence's, is at most `bound`.

    Tokens that are not usable are in no statistic. Raises ValueError on an unknown name.
    """
    if name not in REJECTIONS:
        raise ValueError(f"learner.rejection = {name!r}: one of {', '.join(map(repr, REJECTIONS))}")
    statistic, over, of_negative = REJECTIONS[name]
    near, far = (torch.where(usable, lp, -1.0).detach() for lp in (numerator, denominator))
    values = torch.where(usable, statistic(near, far), 0.0)
    if over == "mean":
        values = sequence_means(values, rows, usable)[rows]
    elif over == "max":
        zeros = torch.zeros_like(sequence_sums(values, rows))
        values = zeros.scatter_reduce(0, rows, values, "amax")[rows]
    rejected = values > bound
    return ~(rejected & (advantages < 0)) if of_negative else ~rejected

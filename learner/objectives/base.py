"""What every objective takes and gives: elementwise over action tokens, so that it may be called on
any slice of them.

All tensors are float[n] (or any one shape), aligned with the action tokens. Objectives neither
mask, weigh nor reduce: `learner.loss` does each once, for all of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from learner.importance import LOG_RATIO_LIMIT


class Terms(NamedTuple):
    """What is known of the tokens besides their current log-probs; finite, and without gradient.

    `sequence_log_ratio` is the mean of current − proximal over a token's own sequence, for
    objectives that need it (zeros otherwise).
    """

    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequence_log_ratio: Tensor

    def part(self, chunk: slice) -> "Terms":
        """The terms of these tokens."""
        return Terms(*(values[chunk] for values in self))


class Bounds(NamedTuple):
    """Where an objective's trust region ends; `cap` None: without one."""

    low: float
    high: float
    cap: float | None = None


class PolicyLoss(NamedTuple):
    """`losses` has a gradient; `clipped` (bool) says where the trust region changed it."""

    losses: Tensor
    clipped: Tensor


Objective = Callable[[Tensor, Terms, Bounds], PolicyLoss]


def policy_ratio(current_logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """exp(current − proximal), the log clamped to ±20; the proximal log-probs get no gradient."""
    difference = current_logprobs - proximal_logprobs.detach()
    return torch.exp(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> PolicyLoss:
    """PPO's max(−A ρ, −A clip(ρ, 1 − low, 1 + high)) of a ratio with gradient (arXiv 1707.06347).

    With a cap c, the loss of a negative advantage is at most −A c (dual clip, arXiv 1912.09729). A
    token is clipped where the bounded branch decides.
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    losses = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if bounds.cap is not None:
        ceiling = torch.where(advantages < 0, -advantages * bounds.cap, torch.inf)
        clipped = clipped | (losses > ceiling)
        losses = torch.minimum(losses, ceiling)
    return PolicyLoss(losses, clipped.detach())

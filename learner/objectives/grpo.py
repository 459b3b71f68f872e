"""GRPO with clip-higher (DAPO, arXiv 2503.14476), decoupled (AReaL, arXiv 2505.24298).

    L_t = w_t · max(−A_t ρ_t, −A_t clip(ρ_t, 1 − ε_low, 1 + ε_high)),   ρ = exp(current − proximal)

w is the truncated behaviour_ratio, without gradient. Summed by `token_mean` with one denominator
per step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from learner.importance import LOG_RATIO_LIMIT


class PolicyLoss(NamedTuple):
    """losses: float[B, T], 0 off the mask; clipped: bool[B, T], where the clip decided (no gradient
    there).
    """

    losses: Tensor
    clipped: Tensor


def policy_ratio(current_logprobs: Tensor, proximal_logprobs: Tensor, mask: Tensor) -> Tensor:
    """float[B, T]: exp(current − proximal), log clamped to ±20; 1 off the mask, with no gradient
    there.
    """
    difference = torch.where(mask, current_logprobs - proximal_logprobs.detach(), 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def grpo_loss(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped loss of every action token.

    All inputs [B, T]; `weights` are behaviour ratios, `mask` the tokens that may be trained.
    `dual_clip` c > 1 bounds the loss of a negative advantage by −A·c (arXiv 1912.09729). Only
    `current_logprobs` has a gradient.
    """
    ratio = policy_ratio(current_logprobs, proximal_logprobs, mask)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(plain, bounded)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    losses = torch.where(mask, losses * weights.detach(), 0.0)
    return PolicyLoss(losses, mask & (bounded > plain).detach())


def token_mean(losses: Tensor, action_tokens: int) -> Tensor:
    """Scalar: Σ L / action_tokens, the number of action tokens of the *whole* step, before any
    masking.

    A denominator local to a micro-batch, or one that shrinks with rejection, would weigh tokens by
    company.
    """
    return losses.sum() / action_tokens

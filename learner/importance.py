"""The importance weight between the policy that sampled and the centre of the trust region.

behaviour_ratio w = exp(proximal − behaviour) corrects for *how old* a token is; policy_ratio, in
the objective, limits *how far* one update moves. Each enters the loss exactly once (AReaL, arXiv
2505.24298). All tensors are float[B, T] aligned with the tokens, masks bool[B, T]; nothing here has
a gradient.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def finite_mask(behaviour_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """bool[B, T]: the action tokens whose recorded log-prob is a number; the others cannot be
    weighted.
    """
    return loss_mask & behaviour_logprobs.isfinite()


def behaviour_ratio(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    cap: float | None = None,
) -> Tensor:
    """float[B, T]: min(exp(proximal − behaviour), cap) where mask, else 0; detached.

    The log-ratio is clamped to ±20 before `exp`. `cap` None leaves it untruncated (for
    diagnostics). Truncated importance sampling: Yao et al. 2025; `cap` is its C.
    """
    # Masked positions may hold NaN or inf: zero the difference first, because 0 * inf is NaN.
    difference = torch.where(mask, proximal_logprobs - behaviour_logprobs, 0.0).detach()
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if cap is not None:
        ratio = ratio.clamp(max=cap)
    return torch.where(mask, ratio, 0.0)


def effective_sample_size(ratio: Tensor, mask: Tensor) -> Tensor:
    """Scalar in (0, 1]: (Σ w)² / (N Σ w²) over the N masked tokens; 1 when all weights are equal,
    NaN if N = 0.

    Give it untruncated weights: truncation flatters the number.
    """
    weights = ratio[mask].double()
    return weights.sum().square() / (weights.numel() * weights.square().sum())

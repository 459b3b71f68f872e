"""DPPO with the binary total variation (arXiv 2602.04879): the trust region is in probabilities.

    L = −A sg(min(ρ, cap)) log π · keep,   ρ = exp(current − proximal)
    keep: π − μ ≤ high where A > 0, π − μ ≥ −low elsewhere

π − μ is the difference to the *behaviour* policy, so that a rare token's large ratio is no reason
to drop it and a likely token's small one no licence.
"""

import torch
from torch import Tensor

from learner.objectives.base import Bounds, PolicyLoss, Terms, policy_ratio

BOUNDS = Bounds(0.2, 0.2, cap=5.0)


def dppo_tv(current_logprobs: Tensor, terms: Terms, bounds: Bounds) -> PolicyLoss:
    """float[n] losses; a token is clipped where it has moved too far to be kept."""
    current = current_logprobs.detach()
    moved = current.exp() - terms.behaviour.exp()
    keep = torch.where(terms.advantages > 0, moved <= bounds.high, moved >= -bounds.low)
    ratio = policy_ratio(current, terms.proximal)
    if bounds.cap is not None:
        ratio = ratio.clamp(max=bounds.cap)
    losses = -terms.advantages * torch.where(keep, ratio, 0.0) * current_logprobs
    return PolicyLoss(losses, ~keep)

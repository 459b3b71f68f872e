"""REINFORCE (Williams 1992): L = −A log π(a).

It has no policy ratio and no trust region: off-policy, its whole correction is the behaviour
weight, which is therefore current over behaviour (truncated: AIPO, arXiv 2505.24034).
"""

import torch
from torch import Tensor

from learner.objectives.base import Bounds, PolicyLoss, Terms

BOUNDS = Bounds(0.0, 0.0)  # nothing to bound


def reinforce(current_logprobs: Tensor, terms: Terms, bounds: Bounds) -> PolicyLoss:
    """float[n] losses; nothing is ever clipped."""
    losses = -terms.advantages * current_logprobs
    return PolicyLoss(losses, torch.zeros_like(losses, dtype=torch.bool))

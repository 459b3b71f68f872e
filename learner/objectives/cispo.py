"""CISPO (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786): the ratio is bounded, the token
never silenced.

    L = −sg(clip(ρ, 1 − low, 1 + high)) A log π,   ρ = exp(current − proximal)

Canonical bounds are [0, 5]: low 1, high 4. A lower bound above 0 would hold up tokens that the
policy has left.
"""

from torch import Tensor

from learner.objectives.base import Bounds, PolicyLoss, Terms, policy_ratio

BOUNDS = Bounds(1.0, 4.0)


def cispo(current_logprobs: Tensor, terms: Terms, bounds: Bounds) -> PolicyLoss:
    """float[n] losses; a token counts as clipped where its ratio is bounded."""
    ratio = policy_ratio(current_logprobs.detach(), terms.proximal)
    bounded = ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    return PolicyLoss(-bounded * terms.advantages * current_logprobs, bounded != ratio)

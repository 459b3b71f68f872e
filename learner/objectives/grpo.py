"""GRPO's clipped loss (arXiv 2402.03300), with clip-higher (DAPO, arXiv 2503.14476).

    L = max(−A ρ, −A clip(ρ, 1 − low, 1 + high)),   ρ = exp(current − proximal)

With a cap c, the loss of a negative advantage is at most −A c (dual clip, arXiv 1912.09729).
"""

from torch import Tensor

from learner.objectives.base import Bounds, PolicyLoss, Terms, clipped_surrogate, policy_ratio

BOUNDS = Bounds(0.2, 0.28)


def grpo(current_logprobs: Tensor, terms: Terms, bounds: Bounds) -> PolicyLoss:
    """float[n] losses; a token is clipped where the bounded branch decides."""
    ratio = policy_ratio(current_logprobs, terms.proximal)
    return clipped_surrogate(ratio, terms.advantages, bounds)

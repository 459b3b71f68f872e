"""GSPO (arXiv 2507.18071): the clip acts on a sequence's geometric-mean ratio, all tokens at once.

    L = max(−A s_t, −A clip(s_t, 1 − low, 1 + high)),   s_t = exp(lp − sg(lp) + sg(log s))

log s is the mean of current − proximal over the sequence's usable tokens. s_t has the sequence
ratio's value and lets each token's own gradient through (verl's form; the sequence's gradient
exactly while the advantage is constant in it). A mean ratio stays near 1: bounds as wide as a token
ratio's would never act.
"""

import torch
from torch import Tensor

from learner.objectives.base import Bounds, PolicyLoss, Terms, clipped_surrogate

BOUNDS = Bounds(3e-4, 4e-4)
LOG_LIMIT = 10.0


def gspo(current_logprobs: Tensor, terms: Terms, bounds: Bounds) -> PolicyLoss:
    """float[n] losses; needs `terms.sequence_log_ratio` under the weights of `current_logprobs`."""
    own = current_logprobs - current_logprobs.detach()
    ratio = torch.exp((own + terms.sequence_log_ratio.detach()).clamp(max=LOG_LIMIT))
    return clipped_surrogate(ratio, terms.advantages, bounds)

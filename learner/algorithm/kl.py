"""Estimators of KL(π ‖ reference) at sampled tokens, with d = current − reference:

    k1 = d     k2 = d² / 2     k3 = e^{−d} − 1 + d     k3++ = exp(current − sg(current)) · k3

Their gradients differ *in the loss*, under tokens drawn from the current policy:

    estimator   E[value]     E[gradient]
    k1          KL(π ‖ ref)  0: no use as a loss, only as a number to watch
    k2          biased       ∇ KL(π ‖ ref)
    k3          KL(π ‖ ref)  ∇ KL(ref ‖ π): the *forward* KL
    k3++        KL(π ‖ ref)  ∇ KL(π ‖ ref): value and gradient agree

Drawn from another policy, each needs the detached importance weight that `TokenLoss` gives it.
k1–k3: Schulman 2020; k3++: EMA-PG's code; the weight: DeepSeek-V3.2, arXiv 2512.02556, equation 7.
"""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithm.importance import LOG_RATIO_LIMIT

Estimator = Literal["k1", "k2", "k3", "k3++"]


def estimate(name: Estimator, current_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """float[n]: the estimate at each token; the reference gets no gradient.

    In k3 and k3++ d is clamped to ±20 before `exp`, so no token is ever infinite. Raises ValueError
    on an unknown name.
    """
    difference = current_logprobs - reference_logprobs.detach()
    if name == "k1":
        return difference
    if name == "k2":
        return difference.square() / 2
    clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = torch.exp(-clamped) - 1 + clamped
    if name == "k3":
        return k3
    if name == "k3++":
        return torch.exp(current_logprobs - current_logprobs.detach()) * k3
    raise ValueError(f"learner.kl_estimator = {name!r}: one of 'k1', 'k2', 'k3', 'k3++'")

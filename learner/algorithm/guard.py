"""The likelihood guard: what did no harm may not become less likely.

GRPO on Search-R1 collapses by *lazy likelihood displacement*: likelihoods sink, of right answers
too, until their gradients explode (LLDS, arXiv 2512.04220). With A ≥ 0, where a whole action or
sequence is less likely than when it was sampled, its tokens that are have a loss of their own:

    G_t = 1[A_t ≥ 0] · 1[Σ_span (behaviour − current) > 0] · max(0, behaviour_t − current_t)
"""

import torch
from torch import Tensor

from learner.algorithm.importance import log_ratio, sequence_sums


def guarded(
    current_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    *,
    advantages: Tensor,
    spans: Tensor,
    usable: Tensor,
) -> Tensor:
    """bool[N]: the usable tokens, A ≥ 0, of the spans that are less likely than when sampled.

    `spans` int64[N] numbers each token's action or sequence. No gradient.
    """
    loss = log_ratio(behaviour_logprobs, current_logprobs, usable & (advantages >= 0))
    return usable & (advantages >= 0) & (sequence_sums(loss, spans) > 0)[spans]


def penalty(current_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """max(0, behaviour − current), float[n]: of each token alone, its gradient −1 or 0."""
    return torch.relu(behaviour_logprobs.detach() - current_logprobs)

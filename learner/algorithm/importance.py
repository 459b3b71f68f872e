"""The importance weight between the policy that sampled and the centre of the trust region.

behaviour_ratio w = exp(proximal − behaviour) corrects for *how old* a token is; policy_ratio, in
the objective, limits *how far* one update moves. Each enters the loss exactly once (AReaL, arXiv
2505.24298). Tensors are float[N] over the action tokens of a micro-batch, `rows` int64[N] is each
token's sequence, `usable` bool[N] is true where the ratio is finite; nothing here has a gradient.
"""

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
Level = Literal["token", "sequence", "geometric"]
Rule = Literal["truncate", "mask", "none"]


def log_ratio(numerator: Tensor, denominator: Tensor, usable: Tensor) -> Tensor:
    """float[N]: numerator − denominator where usable, else 0, detached and not clamped.

    Unusable positions may hold NaN or inf: they are replaced before any sum can spread them.
    """
    return torch.where(usable, numerator - denominator, 0.0).detach()


def sequence_sums(values: Tensor, rows: Tensor) -> Tensor:
    """float[B]: the sum of `values` over each sequence, B up to the last that has tokens."""
    count = int(rows.max()) + 1 if len(rows) else 0
    return values.new_zeros(count).index_add(0, rows, values)


def sequence_means(values: Tensor, rows: Tensor, usable: Tensor) -> Tensor:
    """float[B]: the mean of `values` over each sequence's usable tokens, 0 where it has none.

    `values` are 0 where not usable: a token without a ratio is left out, not counted as ratio 1.
    """
    return sequence_sums(values, rows) / sequence_sums(usable.to(values), rows).clamp(min=1.0)


def behaviour_ratio(log_ratios: Tensor, rows: Tensor, usable: Tensor, level: Level) -> Tensor:
    """float[N]: the untruncated ratio of each token, or of its sequence (product, or geometric
    mean).

    The logarithm is clamped to ±20 before `exp`. Raises ValueError on an unknown level.
    """
    if level == "sequence":
        log_ratios = sequence_sums(log_ratios, rows)[rows]
    elif level == "geometric":
        log_ratios = sequence_means(log_ratios, rows, usable)[rows]
    elif level != "token":
        raise ValueError(
            f"learner.behaviour_level = {level!r}: one of 'token', 'sequence', 'geometric'"
        )
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def behaviour_weights(
    ratios: Tensor, usable: Tensor, *, rule: Rule, floor: float, cap: float
) -> Tensor:
    """float[N]: the factor of each token's loss; 0 where not usable.

    "truncate": clamp(ratio, floor, cap) (truncated importance sampling, Yao et al. 2025; `cap` is
    its C). "mask": ratio within [floor, cap], else 0 (IcePop). "none": 1. Raises ValueError on
    another rule.
    """
    if rule == "truncate":
        weights = ratios.clamp(floor, cap)
    elif rule == "mask":
        weights = torch.where((ratios >= floor) & (ratios <= cap), ratios, 0.0)
    elif rule == "none":
        weights = torch.ones_like(ratios)
    else:
        raise ValueError(f"learner.behaviour_weight = {rule!r}: one of 'truncate', 'mask', 'none'")
    return torch.where(usable, weights, 0.0)


def effective_sample_size(weights: Tensor) -> Tensor:
    """Scalar in (0, 1]: (Σ w)² / (N Σ w²); 1 when all are equal, NaN if N = 0.

    Only relative size counts. Give it untruncated weights too: truncation flatters the number.
    """
    weights = weights.double()
    return weights.sum().square() / (weights.numel() * weights.square().sum())

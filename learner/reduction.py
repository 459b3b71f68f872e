"""Coefficients of sequences, fixed for the whole step before anything is masked or rejected."""

from collections.abc import Sequence
from typing import Literal

Reduction = Literal["token_mean", "sequence_mean", "constant_length"]


def row_coefficients(
    action_counts: Sequence[int], reduction: Reduction, constant_length_tokens: int
) -> list[float]:
    """The factor of every token loss of each sequence of the step; the loss is the plain sum.

    A denominator local to a micro-batch or a rank, or one that shrinks with rejection, would weigh
    tokens by their company. With n_i action tokens in sequence i, and S sequences that have any:
    "token_mean" 1 / Σ n_i (DAPO), "sequence_mean" 1 / (S n_i) (GRPO), "constant_length"
    1 / (S constant) (Dr. GRPO, arXiv 2503.20783). Raises ValueError on another reduction.
    """
    sequences = sum(count > 0 for count in action_counts)
    if reduction == "token_mean":
        return [1.0 / max(sum(action_counts), 1)] * len(action_counts)
    if reduction == "sequence_mean":
        return [1.0 / (sequences * count) if count else 0.0 for count in action_counts]
    if reduction == "constant_length":
        return [1.0 / max(sequences * constant_length_tokens, 1)] * len(action_counts)
    raise ValueError(
        f"learner.reduction = {reduction!r}: one of 'token_mean', 'sequence_mean', "
        "'constant_length'"
    )

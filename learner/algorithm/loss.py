"""The loss of one micro-batch: objective × behaviour weight × coefficient, plus the KL to the
anchor and the likelihood guard. Here alone weights multiply, masks act and tokens are summed.

    loss = Σ_t c_t (w_t L_t + kl_coef · sg(min(w_t ρ_t, C)) · KL_t + guard_t G_t)

w_t ρ_t, behaviour weight times policy ratio, is the whole correction of a token. L_t holds its ρ_t
already; an estimator of the KL does not, and without ρ_t would be one under the policies that
sampled. w_t ρ_t is capped like the behaviour weight (C), or one token that has become likely could
outweigh a batch. A token that must not act has w_t = 0 in both terms. The coefficients c_t are
those of the token's sequence, fixed for the whole step before anything is masked or rejected.

A `TokenLoss` may be called on any slice of the action tokens: the head evaluates it chunk by chunk
and makes the gradient there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from learner.algorithm import kl
from learner.algorithm.guard import penalty
from learner.algorithm.objectives import (
    ClipBounds,
    Objective,
    PolicyLoss,
    Reduction,
    Terms,
    policy_ratio,
)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of N action tokens. Tensors are float[N], without gradient; `weights` are 0 where a
    token must not act; without a `reference` there is no KL term. `guards` are the factors of the
    likelihood guard, 0 where it does not act.
    """

    objective: Objective
    bounds: ClipBounds
    terms: Terms
    weights: Tensor
    coefficients: Tensor
    reference: Tensor | None = None
    kl_estimator: kl.Estimator = "k3++"
    kl_coef: float = 0.0
    kl_cap: float = math.inf
    guards: Tensor | None = None

    def __call__(self, current_logprobs: Tensor, chunk: slice = slice(None)) -> Tensor:
        """Return the chunk's share of the step's loss, a scalar; `current_logprobs` float[n]."""
        return self.tokens(current_logprobs, chunk).sum()

    def tokens(self, current_logprobs: Tensor, chunk: slice = slice(None)) -> Tensor:
        """Return float[n]: each token's part of that share."""
        losses = self.weights[chunk] * self.policy(current_logprobs, chunk).losses
        if self.reference is not None and self.kl_coef:
            losses = losses + self.kl_coef * self.divergence(current_logprobs, chunk)
        if self.guards is not None:
            held = penalty(current_logprobs, self.terms.behaviour[chunk])
            losses = losses + self.guards[chunk] * held
        return losses * self.coefficients[chunk]

    def policy(self, current_logprobs: Tensor, chunk: slice = slice(None)) -> PolicyLoss:
        """Return the objective's own losses, unweighted, and where its trust region acted."""
        return self.objective(current_logprobs, self.terms.part(chunk), self.bounds)

    def divergence(self, current_logprobs: Tensor, chunk: slice = slice(None)) -> Tensor:
        """Return float[n]: the weighted estimate of the KL to the anchor, token by token."""
        assert self.reference is not None
        ratio = policy_ratio(current_logprobs.detach(), self.terms.proximal[chunk])
        weights = (self.weights[chunk] * ratio).clamp(max=self.kl_cap)
        return weights * kl.estimate(self.kl_estimator, current_logprobs, self.reference[chunk])


def row_coefficients(
    action_counts: Sequence[int], reduction: Reduction, constant_length_tokens: int
) -> list[float]:
    """Return the factor of each rollout's token losses; the step's loss is their plain sum.

    A denominator local to a micro-batch or a rank, or one that shrinks with rejection, would weigh
    tokens by their company. With n_i action tokens in rollout i, and S rollouts that have any:
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

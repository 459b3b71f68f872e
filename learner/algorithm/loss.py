"""The loss of one micro-batch: objective × behaviour weight × coefficient, plus the KL to the
anchor and the likelihood guard. Here alone weights multiply, masks act and tokens are summed.

    loss = Σ_t c_t (w_t L_t + kl_coef · (H_t + sg(min(r_t ρ_t, C)) · K_t) + guard_t G_t)

r_t ρ_t, behaviour ratio times policy ratio, is the whole correction of a token, whatever is done to
r_t to make w_t. L_t holds its ρ_t already; an estimate K_t of the KL at the sampled token does not,
and without ρ_t would be one under the policies that sampled. r_t ρ_t is capped like the behaviour
weight (C), or one token that has become likely could outweigh a batch. H_t, the part of a KL that
is summed over candidates, is of no sample and has no weight. A token that must not act has w_t = 0,
and no KL. The coefficients c_t are those of the token's sequence, fixed for the whole step before
anything is masked or rejected.

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
    token must not act; without a `reference` there is no KL term. With `topk` the KL is over its
    candidates, else `kl_estimator`'s; `kl_ratios` None: nothing of it is weighted. `guards` are the
    factors of the likelihood guard, 0 where it does not act.
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
    kl_ratios: Tensor | None = None
    topk: kl.TopK | None = None
    guards: Tensor | None = None

    def __call__(self, current_logprobs: Tensor, chunk: slice = slice(None)) -> Tensor:
        """Return the chunk's share of the step's loss, a scalar; `current_logprobs` float[n], or
        with `topk` [n, 1 + k]: of each token, then of its candidates.
        """
        return self.tokens(current_logprobs, chunk).sum()

    def tokens(self, current_logprobs: Tensor, chunk: slice = slice(None)) -> Tensor:
        """Return float[n]: each token's part of that share."""
        table, current_logprobs = current_logprobs, sampled(current_logprobs)
        losses = self.weights[chunk] * self.policy(current_logprobs, chunk).losses
        if self.reference is not None and self.kl_coef:
            losses = losses + self.kl_coef * self.divergence(table, chunk)
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
        own, reference = sampled(current_logprobs), self.reference[chunk]
        acts = self.weights[chunk].ne(0.0).to(own)
        weights = acts
        if self.kl_ratios is not None:
            ratio = policy_ratio(own.detach(), self.terms.proximal[chunk])
            weights = acts * (self.kl_ratios[chunk] * ratio).clamp(max=self.kl_cap)
        if self.topk is None:
            return weights * kl.estimate(self.kl_estimator, own, reference)
        head, tail = self.topk.part(chunk).parts(current_logprobs, reference)
        return acts * head + weights * tail


def sampled(logprobs: Tensor) -> Tensor:
    """float[n]: of the tokens themselves, also where those of candidates [n, 1 + k] follow."""
    return logprobs if logprobs.ndim == 1 else logprobs[:, 0]


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

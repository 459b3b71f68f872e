"""The objectives: per-token losses, the five side by side, each with its formula and source.

All tensors are float[n] (or any one shape), aligned with the action tokens. Objectives act on each
token by itself, so that they may be called on any slice, and neither mask, weigh nor reduce:
`TokenLoss` does each once, for all of them. ρ = exp(current − proximal) is the policy ratio, A the
advantage, π and μ are the probabilities under the current and the behaviour policy.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm.importance import LOG_RATIO_LIMIT

SEQUENCE_LOG_RATIO_LIMIT = 10.0


class Terms(NamedTuple):
    """The tokens besides their current log-probs; finite, and without gradient.

    `sequence_log_ratio` is the mean of current − proximal over a token's own sequence, for
    objectives that need it (zeros otherwise).
    """

    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequence_log_ratio: Tensor

    def part(self, chunk: slice) -> "Terms":
        """The terms of these tokens."""
        return Terms(*(values[chunk] for values in self))


class ClipBounds(NamedTuple):
    """The ends of a trust region; `cap` None: without one."""

    low: float
    high: float
    cap: float | None = None


class PolicyLoss(NamedTuple):
    """Losses with a gradient; `clipped` (bool) is true where the trust region changed one."""

    losses: Tensor
    clipped: Tensor


Objective = Callable[[Tensor, Terms, ClipBounds], PolicyLoss]
Reduction = Literal["token_mean", "sequence_mean", "constant_length"]


class Defaults(NamedTuple):
    """An objective with what it is published with: its bounds, and how its tokens are summed."""

    objective: Objective
    bounds: ClipBounds
    reduction: Reduction = "token_mean"


def policy_ratio(current_logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """exp(current − proximal), the log clamped to ±20; the proximal log-probs get no gradient."""
    difference = current_logprobs - proximal_logprobs.detach()
    return torch.exp(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, bounds: ClipBounds) -> PolicyLoss:
    """PPO's max(−A ρ, −A clip(ρ, 1 − low, 1 + high)) of a ratio with gradient (arXiv 1707.06347).

    With a cap c, the loss of a negative advantage is at most −A c (dual clip, arXiv 1912.09729). A
    token is clipped where the bounded branch decides.
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    losses = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if bounds.cap is not None:
        ceiling = torch.where(advantages < 0, -advantages * bounds.cap, torch.inf)
        clipped = clipped | (losses > ceiling)
        losses = torch.minimum(losses, ceiling)
    return PolicyLoss(losses, clipped.detach())


def grpo(current_logprobs: Tensor, terms: Terms, bounds: ClipBounds) -> PolicyLoss:
    """GRPO's clipped loss (arXiv 2402.03300), with clip-higher (DAPO, arXiv 2503.14476).

        L = max(−A ρ, −A clip(ρ, 1 − low, 1 + high))

    A token is clipped where the bounded branch decides.
    """
    ratio = policy_ratio(current_logprobs, terms.proximal)
    return clipped_surrogate(ratio, terms.advantages, bounds)


def cispo(current_logprobs: Tensor, terms: Terms, bounds: ClipBounds) -> PolicyLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786): no token is ever silenced.

        L = −sg(clip(ρ, 1 − low, 1 + high)) A log π

    A token is clipped where its ratio is bounded. Canonical bounds are [0, 5]: a lower bound above
    0 would hold up tokens that the policy has left.
    """
    ratio = policy_ratio(current_logprobs.detach(), terms.proximal)
    bounded = ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    return PolicyLoss(-bounded * terms.advantages * current_logprobs, bounded != ratio)


def gspo(current_logprobs: Tensor, terms: Terms, bounds: ClipBounds) -> PolicyLoss:
    """GSPO (arXiv 2507.18071): the clip acts on a sequence's geometric-mean ratio, on all its
    tokens at once.

        L = max(−A s_t, −A clip(s_t, 1 − low, 1 + high)),   s_t = exp(lp − sg(lp) + sg(log s))

    lp is log π; log s, `terms.sequence_log_ratio`, is the mean of current − proximal over the
    sequence's usable tokens, under the weights of `current_logprobs`. s_t has the sequence ratio's
    value and lets each token's own gradient through (verl's form; the sequence's gradient exactly
    while the advantage is constant in it). A mean ratio stays near 1: bounds as wide as a token
    ratio's would never act.
    """
    own = current_logprobs - current_logprobs.detach()
    log_ratio = own + terms.sequence_log_ratio.detach()
    ratio = torch.exp(log_ratio.clamp(max=SEQUENCE_LOG_RATIO_LIMIT))
    return clipped_surrogate(ratio, terms.advantages, bounds)


def dppo_tv(current_logprobs: Tensor, terms: Terms, bounds: ClipBounds) -> PolicyLoss:
    """DPPO with the binary total variation (arXiv 2602.04879): a trust region in probabilities.

        L = −A sg(min(ρ, cap)) log π · keep
        keep: π − μ ≤ high where A > 0, π − μ ≥ −low elsewhere

    A token is clipped where it has moved too far to be kept. π − μ is the difference to the
    *behaviour* policy, so that a rare token's large ratio is no reason to drop it and a likely
    token's small one no licence.
    """
    current = current_logprobs.detach()
    moved = current.exp() - terms.behaviour.exp()
    keep = torch.where(terms.advantages > 0, moved <= bounds.high, moved >= -bounds.low)
    ratio = policy_ratio(current, terms.proximal)
    if bounds.cap is not None:
        ratio = ratio.clamp(max=bounds.cap)
    losses = -terms.advantages * torch.where(keep, ratio, 0.0) * current_logprobs
    return PolicyLoss(losses, ~keep)


def reinforce(current_logprobs: Tensor, terms: Terms, bounds: ClipBounds) -> PolicyLoss:
    """REINFORCE (Williams 1992): L = −A log π.

    It has no policy ratio and no trust region: off-policy, its whole correction is the behaviour
    weight, which is therefore current over behaviour (truncated: AIPO, arXiv 2505.24034). Nothing
    is ever clipped.
    """
    losses = -terms.advantages * current_logprobs
    return PolicyLoss(losses, torch.zeros_like(losses, dtype=torch.bool))


def moment_bounds(log_ratios: Tensor, advantages: Tensor, budget: float) -> ClipBounds:
    """M2PO's bounds [e^−τ, e^τ] of a whole batch (arXiv 2510.01161): wide where it is fresh.

        H = {t: A_t log ρ_t > 0},   τ the largest with  mean_H min(log² ρ, τ²) ≤ budget

    H are the tokens that the clip can act on: pushed where they have gone already. Where all of H
    is within the budget nothing is clipped. As released, τ is the |log ρ| of a token; where that of
    each is too large, √budget.
    """
    squares = log_ratios[advantages.sign() * log_ratios > 0].double().square().sort().values
    count = len(squares)
    if not count or float(squares.mean()) <= budget:
        return ClipBounds(1.0, torch.inf)
    beyond = torch.arange(count - 1, -1, -1, device=squares.device)
    within = squares[squares.cumsum(0) + beyond * squares <= budget * count]
    tau = float(within[-1] if len(within) else torch.tensor(budget)) ** 0.5
    return ClipBounds(-math.expm1(-tau), math.expm1(tau))


# By the name that `learner.objective` gives them.
OBJECTIVES: dict[str, Defaults] = {
    "grpo": Defaults(grpo, ClipBounds(0.2, 0.28)),
    "cispo": Defaults(cispo, ClipBounds(1.0, 4.0)),
    "gspo": Defaults(gspo, ClipBounds(3e-4, 4e-4), "sequence_mean"),  # its equation 5
    "dppo_tv": Defaults(dppo_tv, ClipBounds(0.2, 0.2, cap=5.0)),
    "reinforce": Defaults(reinforce, ClipBounds(0.0, 0.0)),  # nothing to bound
}


def choose(config: LearnerConfig) -> Defaults:
    """The configured objective, its bounds and reduction: the configured ones, else its own.

    Raises ValueError on an unknown name.
    """
    if config.objective not in OBJECTIVES:
        known = ", ".join(repr(name) for name in OBJECTIVES)
        raise ValueError(f"learner.objective = {config.objective!r}: one of {known}")
    objective, own, reduction = OBJECTIVES[config.objective]
    bounds = ClipBounds(
        own.low if config.clip_low is None else config.clip_low,
        own.high if config.clip_high is None else config.clip_high,
        own.cap if config.ratio_cap is None else config.ratio_cap,
    )
    return Defaults(objective, bounds, config.reduction or reduction)

"""Gauges of a step over its action tokens: staleness, clipping, ratios, mismatch.

Ratios are over the tokens with a finite behaviour log-prob, and measured before the update.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm.importance import (
    LOG_RATIO_LIMIT,
    behaviour_ratio,
    effective_sample_size,
    log_ratio,
    sequence_sums,
)
from learner.algorithm.loss import TokenLoss
from learner.algorithm.objectives import policy_ratio
from learner.model.scorer import TokenScores
from learner.packing import MicroBatch

# The histogram's bars: (first, last) staleness of each, in steps.
STALENESS_BARS = {
    "0": (0, 0),
    "1": (1, 1),
    "2": (2, 2),
    "3_4": (3, 4),
    "5_8": (5, 8),
    "9_16": (9, 16),
    "17_up": (17, 1 << 30),
}
# The bars of the behaviour ratio: (from, to) of each; nearly all tokens lie around 1.
RATIO_BARS = {
    "to_0.5": (0.0, 0.5),
    "0.5_0.8": (0.5, 0.8),
    "0.8_0.95": (0.8, 0.95),
    "0.95_1.05": (0.95, 1.05),
    "1.05_1.25": (1.05, 1.25),
    "1.25_2": (1.25, 2.0),
    "2_up": (2.0, math.inf),
}


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """One micro-batch's N action tokens; every field is [N] and has no gradient."""

    rows: Tensor  # each token's row in this micro-batch
    loss: Tensor  # its part of the step's loss
    log_ratio: Tensor  # of the behaviour weight; 0 where not usable
    usable: Tensor  # bool: the behaviour log-prob is finite
    clipped: Tensor  # bool: acts, and the trust region changed it
    rejected: Tensor  # bool: usable, and without weight
    guarded: Tensor  # bool: the likelihood guard acts
    divergence: Tensor  # weighted KL to the anchor; 0 without one
    current: Tensor
    behaviour: Tensor
    entropy: Tensor
    advantages: Tensor
    staleness: Tensor
    sequences: Tensor  # each token's row in the step's batch
    proximal: Tensor  # the centre of the trust region
    ratio: Tensor  # current over that
    weight: Tensor  # of the behaviour, as it was used

    @property
    def moved(self) -> Tensor:
        """current − behaviour, float[N]; 0 where not usable."""
        return torch.where(self.usable, self.current - self.behaviour, 0.0)

    @classmethod
    def of(
        cls, micro: MicroBatch, loss: TokenLoss, scores: TokenScores, config: LearnerConfig
    ) -> "TokenFacts":
        """Collect the facts of a micro-batch whose gradient has been made."""
        current, terms = scores.logprobs, loss.terms
        two_policies = config.centre == "behaviour"
        entropy_bonus = config.entropy_coef * loss.coefficients * scores.entropy
        recorded = micro.behaviour_logprobs[micro.loss_mask]
        usable = recorded.isfinite()
        anchored, rows = loss.reference is not None, micro.rows
        return cls(
            rows=rows,
            loss=loss.tokens(scores.table) - entropy_bonus,
            log_ratio=log_ratio(current if two_policies else terms.proximal, recorded, usable),
            usable=usable,
            clipped=loss.policy(current).clipped & loss.weights.ne(0.0),
            rejected=usable & loss.weights.eq(0.0),
            guarded=torch.zeros_like(usable) if loss.guards is None else loss.guards.gt(0.0),
            divergence=loss.divergence(scores.table) if anchored else torch.zeros_like(current),
            current=current,
            behaviour=recorded,
            entropy=scores.entropy,
            advantages=terms.advantages,
            staleness=micro.staleness[micro.loss_mask],
            sequences=micro.row_ids[rows],
            proximal=terms.proximal,
            ratio=policy_ratio(current, terms.proximal),
            weight=loss.weights,
        )


def diagnose(parts: list[TokenFacts], config: LearnerConfig) -> dict[str, float]:
    """The step's gauges, without those that its tokens cannot tell."""
    names = [field.name for field in fields(TokenFacts)]
    tokens = TokenFacts(**{n: torch.cat([getattr(part, n) for part in parts]) for n in names})
    gauges = {
        "learner/loss": float(tokens.loss.double().sum()),
        "learner/masked_tokens": float((~tokens.usable).sum()),
    }
    if len(tokens.loss):
        gauges["learner/entropy"] = float(tokens.entropy.mean())
        gauges["learner/clip_fraction"] = float(tokens.clipped.double().mean())
        gauges |= _staleness(tokens.staleness)
        if config.guard != "none":
            gauges["learner/guarded_fraction"] = float(tokens.guarded.double().mean())
    if tokens.usable.any():
        if config.rejection != "none" or config.behaviour_weight == "mask":
            rejected = tokens.rejected[tokens.usable]
            gauges["learner/rejected_fraction"] = float(rejected.double().mean())
        sequences = torch.cat([_sequences(part.moved, part) for part in parts])
        gauges["learner/current_ess_sequence"] = _ess(sequences)
        gauges |= _ratios(parts, tokens, config) | _likelihood_changes(tokens, config)
    return gauges


def _staleness(staleness: Tensor) -> dict[str, float]:
    return {
        f"learner/staleness_tokens_{bar}": float(
            ((staleness >= first) & (staleness <= last)).double().mean()
        )
        for bar, (first, last) in STALENESS_BARS.items()
    }


def _ratios(parts: list[TokenFacts], tokens: TokenFacts, config: LearnerConfig) -> dict[str, float]:
    """Of the behaviour ratio at its configured level: its bars, mean, maximum, share outside the
    bounds; and ESS per token and per sequence, untruncated and truncated.
    """
    level, floor, cap = config.behaviour_level, config.behaviour_floor, config.behaviour_cap
    ratio = torch.cat(
        [behaviour_ratio(p.log_ratio, p.rows, p.usable, level)[p.usable] for p in parts]
    )
    sequences = torch.cat([_sequences(part.log_ratio, part) for part in parts])
    log_ratios = tokens.log_ratio[tokens.usable]
    shares = {
        f"learner/ratio_tokens_{bar}": float(((ratio >= low) & (ratio < up)).double().mean())
        for bar, (low, up) in RATIO_BARS.items()
    }
    return shares | {
        "learner/behaviour_ratio_mean": float(ratio.mean()),
        "learner/behaviour_ratio_max": float(ratio.max()),
        "learner/truncated_fraction": float(((ratio > cap) | (ratio < floor)).double().mean()),
        "learner/ess": _ess(log_ratios),
        "learner/ess_truncated": _ess(log_ratios, cap),
        "learner/ess_sequence": _ess(sequences),
        "learner/ess_sequence_truncated": _ess(sequences, cap),
    }


def _sequences(log_ratios: Tensor, part: TokenFacts) -> Tensor:
    """float[S]: the sum over each sequence that has a usable token."""
    known = sequence_sums(part.usable.to(log_ratios), part.rows) > 0
    return sequence_sums(log_ratios, part.rows)[known]


def _ess(log_ratios: Tensor, cap: float | None = None) -> float:
    if cap is None:
        # A common factor changes nothing: so no ratio overflows, and none needs a clamp.
        return float(effective_sample_size((log_ratios.double() - log_ratios.max()).exp()))
    ratios = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return float(effective_sample_size(ratios.clamp(max=cap)))


def _likelihood_changes(tokens: TokenFacts, config: LearnerConfig) -> dict[str, float]:
    """Distance from the sampling policy: of all tokens, by sign of the advantage, of fresh ones."""
    usable, moved = tokens.usable, tokens.moved
    # KL(behaviour ‖ current) of tokens that the behaviour policy sampled: r − 1 − log r.
    far = moved[usable].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    gauges = {
        "learner/behaviour_kl": float((far.expm1() - far).mean()),
        "learner/current_ess": _ess(moved[usable]),
        "learner/current_ratio_max": float(far.max().exp()),
    }
    for name, credited in (
        ("positive", usable & (tokens.advantages > 0)),
        ("negative", usable & (tokens.advantages < 0)),
    ):
        if credited.any():
            gauges[f"learner/likelihood_change_{name}"] = float(moved[credited].mean())
    # Same weights on both sides: what is left is the difference between the two implementations.
    fresh = usable & (tokens.staleness == 0)
    if fresh.any():
        mismatch = moved[fresh].abs()
        gauges["learner/mismatch"] = float(mismatch.mean())
        gauges["learner/mismatch_max"] = float(mismatch.max())
    if config.anchor != "none":
        gauges["learner/anchor_kl"] = float(tokens.divergence[usable].mean())
    return gauges

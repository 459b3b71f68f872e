"""The off-policy correction: the loss of a micro-batch's tokens, from their log-probs under the
policies that were near when they were sampled, and what the configuration makes of their ratios.

Every sum and ratio skips tokens that the policy did not sample.

Where nothing is clipped, truncated or rejected, a token's gradient is multiplied by current over
behaviour in every mode, each factor once:

    learner.proximal        behaviour weight         policy ratio, in the objective
    ema, start_of_update    proximal / behaviour     current / proximal
    behaviour               1, or 0 where rejected   current / behaviour
    none: "reinforce"       current / behaviour      none
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm import kl
from learner.algorithm.guard import guarded
from learner.algorithm.importance import (
    behaviour_ratio,
    behaviour_weights,
    log_ratio,
    sequence_means,
)
from learner.algorithm.loss import TokenLoss, sampled
from learner.algorithm.objectives import ClipBounds, Terms, choose
from learner.algorithm.rejection import accepted
from learner.packing import MicroBatch


class ActionTokens(NamedTuple):
    """A micro-batch's N action tokens, or some of them; float[n], the first two int64[n]."""

    rows: Tensor  # each token's sequence
    actions: Tensor  # each token's action
    recorded: Tensor  # behaviour log-probs, finite or not
    advantages: Tensor
    coefficients: Tensor

    @classmethod
    def of(cls, micro: MicroBatch) -> "ActionTokens":
        """All that a micro-batch has, in the order in which the mask lists them."""
        mask, rows = micro.loss_mask, micro.rows
        return cls(
            rows=rows,
            actions=micro.actions,
            recorded=micro.behaviour_logprobs[mask],
            advantages=micro.advantages[mask],
            coefficients=micro.coefficients[rows],
        )

    def part(self, chunk: slice) -> "ActionTokens":
        """These tokens alone."""
        return ActionTokens(*(values[chunk] for values in self))


def bonus(tokens: ActionTokens, config: LearnerConfig) -> Tensor | None:
    """float[N]: how much each token's entropy takes off the loss; None: nothing."""
    return config.entropy_coef * tokens.coefficients if config.entropy_coef else None


def loss_as_scored(
    tokens: ActionTokens,
    reference: Tensor | None,
    config: LearnerConfig,
    topk: kl.TopK | None = None,
) -> Callable[[Tensor, slice], Tensor]:
    """The loss of tokens whose weights are elementwise in their current log-probs: made chunk by
    chunk, from those of the very pass that makes the gradient.
    """

    def loss(logprobs: Tensor, chunk: slice) -> Tensor:
        far = None if reference is None else reference[chunk]
        top, now = None if topk is None else topk.part(chunk), sampled(logprobs).detach()
        return token_loss(tokens.part(chunk), None, now, far, config, top)(logprobs)

    return loss


def token_loss(
    tokens: ActionTokens,
    proximal: Tensor | None,
    current: Tensor | None,
    reference: Tensor | None,
    config: LearnerConfig,
    topk: kl.TopK | None = None,
    *,
    bounds: ClipBounds | None = None,
) -> TokenLoss:
    """The loss of these tokens, from log-probs float[n] without gradient: the average's where that
    is the centre, current where it is not or `looks_ahead`, and the anchor's where there is one,
    with its candidates where there are some.

    Tokens without a finite behaviour log-prob get weight 0 and finite terms; coefficients are the
    batch's and stay. `bounds`: the step's own, in place of the configured ones.
    """
    objective, configured, _ = choose(config)
    rows, usable = tokens.rows, tokens.recorded.isfinite()
    behaviour = torch.where(usable, tokens.recorded, 0.0)
    if config.centre == "behaviour":
        proximal = behaviour
    elif proximal is None:
        proximal = current
    assert proximal is not None
    sequence = _sequence_log_ratio(current, proximal, rows, usable, config)
    return TokenLoss(
        objective=objective,
        bounds=configured if bounds is None else bounds._replace(cap=configured.cap),
        terms=Terms(proximal, behaviour, tokens.advantages, sequence),
        weights=_acting(tokens, current, proximal, usable, config),
        coefficients=tokens.coefficients,
        reference=reference,
        kl_estimator=config.kl_estimator or ("k1" if config.kl_in == "reward" else "k3++"),
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        kl_cap=config.behaviour_cap,
        kl_ratios=_kl_ratios(proximal, tokens, usable, config),
        topk=topk,
        guards=_guards(tokens, current, usable, config) if config.guard != "none" else None,
    )


def _sequence_log_ratio(
    current: Tensor | None, proximal: Tensor, rows: Tensor, usable: Tensor, config: LearnerConfig
) -> Tensor:
    """The mean of current − proximal over each token's sequence, where the objective needs it."""
    if config.objective != "gspo" or current is proximal:
        return torch.zeros_like(proximal)
    assert current is not None
    return sequence_means(log_ratio(current, proximal, usable), rows, usable)[rows]


def _acting(
    tokens: ActionTokens,
    current: Tensor | None,
    proximal: Tensor,
    usable: Tensor,
    config: LearnerConfig,
) -> Tensor:
    """The weight of each token, 0 where it is rejected: by the two policies of its weight."""
    rows, recorded, two = tokens.rows, tokens.recorded, config.centre == "behaviour"
    if two:
        weights = _accepted(current, proximal, rows, usable, config)
    else:
        weights = _weights(log_ratio(proximal, recorded, usable), rows, usable, config)
    if config.rejection == "none":
        return weights
    numerator = current if two else proximal
    assert numerator is not None and config.rejection_bound is not None
    return weights * accepted(
        config.rejection,
        config.rejection_bound,
        numerator=numerator,
        denominator=recorded,
        advantages=tokens.advantages,
        rows=rows,
        usable=usable,
    )


def _kl_ratios(
    proximal: Tensor, tokens: ActionTokens, usable: Tensor, config: LearnerConfig
) -> Tensor | None:
    """The behaviour ratios by which the KL is weighted, whatever rule the policy's loss has."""
    if config.kl_weight == "none":
        return None
    if config.centre == "behaviour":
        return torch.ones_like(proximal)
    log_ratios = log_ratio(proximal, tokens.recorded, usable)
    return behaviour_ratio(log_ratios, tokens.rows, usable, config.behaviour_level)


def _guards(
    tokens: ActionTokens, current: Tensor | None, usable: Tensor, config: LearnerConfig
) -> Tensor:
    assert current is not None and config.guard_coef is not None
    spans = tokens.actions if config.guard == "action" else tokens.rows
    holds = guarded(
        current, tokens.recorded, advantages=tokens.advantages, spans=spans, usable=usable
    )
    return config.guard_coef * holds.to(current)


def _weights(log_ratios: Tensor, rows: Tensor, usable: Tensor, config: LearnerConfig) -> Tensor:
    return behaviour_weights(
        behaviour_ratio(log_ratios, rows, usable, config.behaviour_level),
        usable,
        rule=config.behaviour_weight,
        floor=config.behaviour_floor,
        cap=config.behaviour_cap,
    )


def _accepted(
    current: Tensor | None, behaviour: Tensor, rows: Tensor, usable: Tensor, config: LearnerConfig
) -> Tensor:
    """With two policies the policy ratio holds the whole correction: the weight only rejects, by
    current over behaviour; a truncation is the objective's own business.
    """
    if config.behaviour_weight != "mask":
        return usable.to(behaviour)
    assert current is not None
    weights = _weights(log_ratio(current, behaviour, usable), rows, usable, config)
    return weights.ne(0.0).to(behaviour)

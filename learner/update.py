"""One optimiser step: centre of the trust region, corrected loss, gradient, step, averages.

Every sum and ratio skips tokens that the policy did not sample.

Where nothing is clipped or truncated, a token's gradient is multiplied by current over behaviour in
every mode, each factor once:

    learner.proximal        behaviour weight         policy ratio, in the objective
    ema, start_of_update    proximal / behaviour     current / proximal
    behaviour               1, or 0 where rejected   current / behaviour
    any, with "reinforce"   current / behaviour      none
"""

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm.importance import (
    behaviour_ratio,
    behaviour_weights,
    log_ratio,
    sequence_means,
)
from learner.algorithm.loss import TokenLoss
from learner.algorithm.objectives import Terms, choose
from learner.algorithm.schedule import learning_rate
from learner.batch import TrainingBatch
from learner.diagnostics import TokenFacts, diagnose
from learner.errors import Diverged
from learner.model.ema import Averages, Ema
from learner.packing import MicroBatch

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.model.engine import Engine

Centre = Literal["ema", "start_of_update", "behaviour"]


def update(
    engine: "Engine", averages: Averages, batch: TrainingBatch, config: LearnerConfig
) -> dict[str, float]:
    """Take one step on the batch, which makes version `batch.step`; return its gauges.

    Raises Diverged on a non-finite loss or gradient.
    """
    step, micro_batches = batch.step, [m.to(engine.device) for m in batch.micro_batches]
    temperature, centre = batch.temperature, centre_of(config)
    current: list[Tensor | None] = [None] * len(micro_batches)
    if looks_ahead(config):
        current = [engine.score(micro, temperature).logprobs for micro in micro_batches]
    proximal = current
    if centre == "ema":
        proximal = logprobs_under(engine, averages.proximal, micro_batches, temperature)
    anchors = logprobs_under(engine, averages.anchor, micro_batches, temperature)
    facts = []
    for micro, near, now, far in zip(micro_batches, proximal, current, anchors, strict=True):
        loss = token_loss(micro, near, now, far, config)
        scores = engine.accumulate(micro, temperature, loss)
        facts.append(TokenFacts.of(micro, loss, scores, centre == "behaviour"))
    gauges = diagnose(engine.gather(facts), config)
    if not math.isfinite(gauges["learner/loss"]):
        raise Diverged(f"step {step}: the loss is {gauges['learner/loss']}")
    lr = learning_rate(step, config)
    grad_norm = engine.step(lr)
    if not math.isfinite(grad_norm):
        raise Diverged(f"step {step}: the gradient's norm is {grad_norm}")
    averages.update(engine)
    gauges |= averages.gauges(batch.gauges.get("replay/staleness", 0.0))
    return {"learner/grad_norm": grad_norm, "learner/lr": lr} | batch.gauges | gauges


def centre_of(config: LearnerConfig) -> Centre:
    """The policy at whose log-probs the behaviour weight and the policy ratio meet.

    REINFORCE has no policy ratio: its weight must reach the current policy, in every mode.
    """
    return "start_of_update" if config.objective == "reinforce" else config.proximal


def looks_ahead(config: LearnerConfig) -> bool:
    """Return True if the loss needs the current log-probs before it is made: one more pass."""
    centre = centre_of(config)
    rejects = centre == "behaviour" and config.behaviour_weight == "mask"
    return centre == "start_of_update" or rejects or config.objective == "gspo"


def token_loss(
    micro: MicroBatch,
    proximal: Tensor | None,
    current: Tensor | None,
    reference: Tensor | None,
    config: LearnerConfig,
) -> TokenLoss:
    """The micro-batch's loss, from log-probs float[N]: proximal (not used with two policies),
    current where `looks_ahead`, and the anchor's where there is one.

    Tokens without a finite behaviour log-prob get weight 0 and finite terms; coefficients are the
    batch's and stay.
    """
    objective, bounds = choose(config)
    mask, rows = micro.loss_mask, micro.rows
    recorded = micro.behaviour_logprobs[mask]
    usable = recorded.isfinite()
    behaviour = torch.where(usable, recorded, 0.0)
    if centre_of(config) == "behaviour":
        proximal = behaviour
        weights = _accepted(current, behaviour, rows, usable, config)
    else:
        assert proximal is not None
        weights = _weights(log_ratio(proximal, recorded, usable), rows, usable, config)
    sequence = torch.zeros_like(behaviour)
    if current is not None:
        drift = log_ratio(current, proximal, usable)
        sequence = sequence_means(drift, rows, usable)[rows]
    return TokenLoss(
        objective=objective,
        bounds=bounds,
        terms=Terms(proximal, behaviour, micro.advantages[mask], sequence),
        weights=weights,
        coefficients=micro.coefficients[rows],
        reference=reference,
        kl_estimator=config.kl_estimator,
        kl_coef=config.kl_coef,
        kl_cap=config.behaviour_cap,
    )


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


def logprobs_under(
    engine: "Engine", ema: Ema | None, micro_batches: list[MicroBatch], temperature: float
) -> list[Tensor | None]:
    """float32[N] per micro-batch: its action tokens under averaged weights; None without any."""
    if ema is None:
        return [None] * len(micro_batches)
    with ema.swapped_in(engine):
        return [engine.score(micro, temperature).logprobs for micro in micro_batches]

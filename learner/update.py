"""One optimiser step: credit by a critic where there is one, centre of the trust region, corrected
loss, gradient, step, averages.

Every sum and ratio skips tokens that the policy did not sample.

Where nothing is clipped or truncated, a token's gradient is multiplied by current over behaviour in
every mode, each factor once:

    learner.proximal        behaviour weight         policy ratio, in the objective
    ema, start_of_update    proximal / behaviour     current / proximal
    behaviour               1, or 0 where rejected   current / behaviour
    any, with "reinforce"   current / behaviour      none
"""

import math
from typing import TYPE_CHECKING, NamedTuple

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
from learner.batch import TrainingBatch
from learner.diagnostics import TokenFacts, diagnose
from learner.errors import Diverged
from learner.model.credit import Critic, judge, policy_rate, teach
from learner.model.ema import Averages, Ema
from learner.model.head import ChunkLoss
from learner.packing import MicroBatch

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.model.engine import Engine


def update(
    engine: "Engine",
    averages: Averages,
    batch: TrainingBatch,
    config: LearnerConfig,
    critic: Critic | None = None,
) -> dict[str, float]:
    """Take one step on the batch, which makes version `batch.step`; return its gauges.

    `critic`: of `learner.baseline: critic`. Raises Diverged on a non-finite loss or gradient.
    """
    micro_batches = [micro.to(engine.device) for micro in batch.micro_batches]
    if critic is None:
        return batch.gauges | _step(engine, averages, batch, micro_batches, config)
    judged, judgements, gauges = judge(critic, micro_batches, config)
    made = _step(engine, averages, batch, judged, config)
    taught = teach(critic, judged, judgements, batch.step, config)
    return batch.gauges | gauges | made | taught


def _step(
    engine: "Engine",
    averages: Averages,
    batch: TrainingBatch,
    micro_batches: list[MicroBatch],
    config: LearnerConfig,
) -> dict[str, float]:
    """The policy's step on these micro-batches of the batch, whose advantages are known."""
    step = batch.step
    temperature = batch.temperature
    current: list[Tensor | None] = [None] * len(micro_batches)
    if looks_ahead(config):
        current = [engine.score(micro, temperature).logprobs for micro in micro_batches]
    nears = logprobs_under(engine, averages.proximal, micro_batches, temperature)
    anchors = logprobs_under(engine, averages.anchor, micro_batches, temperature)
    facts = []
    for micro, near, now, far in zip(micro_batches, nears, current, anchors, strict=True):
        tokens = ActionTokens.of(micro)
        if near is None and now is None:
            scores = engine.accumulate(micro, temperature, loss_as_scored(tokens, far, config))
            loss = token_loss(tokens, None, scores.logprobs, far, config)
        else:
            loss = token_loss(tokens, near, now, far, config)
            scores = engine.accumulate(micro, temperature, loss)
        facts.append(TokenFacts.of(micro, loss, scores, config.centre == "behaviour"))
    gauges = diagnose(engine.gather(facts), config)
    if not math.isfinite(gauges["learner/loss"]):
        raise Diverged(f"step {step}: the loss is {gauges['learner/loss']}")
    lr = policy_rate(step, config)
    grad_norm = engine.step(lr)
    if not math.isfinite(grad_norm):
        raise Diverged(f"step {step}: the gradient's norm is {grad_norm}")
    averages.update(engine)
    gauges |= averages.gauges(batch.gauges.get("replay/staleness", 0.0))
    return {"learner/grad_norm": grad_norm, "learner/lr": lr} | gauges


def looks_ahead(config: LearnerConfig) -> bool:
    """True where the loss of a token needs the current log-probs of its whole sequence: one pass
    more.
    """
    if config.objective == "gspo" and config.centre != "start_of_update":
        return True  # at the start of the update its sequence's ratio is 1
    if config.behaviour_level == "token" or config.centre == "ema":
        return False
    rules = ("mask",) if config.centre == "behaviour" else ("mask", "truncate")
    return config.behaviour_weight in rules


class ActionTokens(NamedTuple):
    """A micro-batch's N action tokens, or some of them; all float[n] but `rows`, int64[n]."""

    rows: Tensor  # each token's sequence
    recorded: Tensor  # behaviour log-probs, finite or not
    advantages: Tensor
    coefficients: Tensor

    @classmethod
    def of(cls, micro: MicroBatch) -> "ActionTokens":
        """All that a micro-batch has, in the order in which the mask lists them."""
        mask, rows = micro.loss_mask, micro.rows
        return cls(
            rows, micro.behaviour_logprobs[mask], micro.advantages[mask], micro.coefficients[rows]
        )

    def part(self, chunk: slice) -> "ActionTokens":
        """These tokens alone."""
        return ActionTokens(*(values[chunk] for values in self))


def loss_as_scored(
    tokens: ActionTokens, reference: Tensor | None, config: LearnerConfig
) -> ChunkLoss:
    """The loss of tokens whose weights are elementwise in their current log-probs: made chunk by
    chunk, from those of the very pass that makes the gradient.
    """

    def loss(logprobs: Tensor, chunk: slice) -> Tensor:
        far = None if reference is None else reference[chunk]
        return token_loss(tokens.part(chunk), None, logprobs.detach(), far, config)(logprobs)

    return loss


def token_loss(
    tokens: ActionTokens,
    proximal: Tensor | None,
    current: Tensor | None,
    reference: Tensor | None,
    config: LearnerConfig,
) -> TokenLoss:
    """The loss of these tokens, from log-probs float[n] without gradient: the average's where that
    is the centre, current where it is not or `looks_ahead`, and the anchor's where there is one.

    Tokens without a finite behaviour log-prob get weight 0 and finite terms; coefficients are the
    batch's and stay.
    """
    objective, bounds, _ = choose(config)
    rows, recorded = tokens.rows, tokens.recorded
    usable = recorded.isfinite()
    behaviour = torch.where(usable, recorded, 0.0)
    if config.centre == "behaviour":
        proximal = behaviour
        weights = _accepted(current, behaviour, rows, usable, config)
    else:
        proximal = current if proximal is None else proximal
        assert proximal is not None
        weights = _weights(log_ratio(proximal, recorded, usable), rows, usable, config)
    sequence = torch.zeros_like(behaviour)
    if config.objective == "gspo" and current is not proximal:
        assert current is not None
        drift = log_ratio(current, proximal, usable)
        sequence = sequence_means(drift, rows, usable)[rows]
    return TokenLoss(
        objective=objective,
        bounds=bounds,
        terms=Terms(proximal, behaviour, tokens.advantages, sequence),
        weights=weights,
        coefficients=tokens.coefficients,
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

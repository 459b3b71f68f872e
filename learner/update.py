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
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm import kl
from learner.algorithm.importance import (
    behaviour_ratio,
    behaviour_weights,
    log_ratio,
    sequence_means,
)
from learner.algorithm.loss import TokenLoss, sampled
from learner.algorithm.objectives import Terms, choose
from learner.batch import TrainingBatch, credit_gauges, credit_of
from learner.diagnostics import TokenFacts, diagnose
from learner.errors import Diverged
from learner.model.anchor import Anchored, anchored
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
    anchors = anchored(engine, averages.anchor, micro_batches, temperature, config)
    penalties: dict[str, float] = {}
    if config.kl_in == "reward":
        micro_batches, penalties = penalise(engine, batch, micro_batches, current, anchors, config)
    facts = []
    for micro, near, now, far in zip(micro_batches, nears, current, anchors, strict=True):
        tokens = ActionTokens.of(micro)
        if near is None and now is None:
            unscored = loss_as_scored(tokens, far.logprobs, config, far.topk)
            scores = engine.accumulate(micro, temperature, unscored, candidates=far.ids)
            loss = token_loss(tokens, None, scores.logprobs, far.logprobs, config, far.topk)
        else:
            loss = token_loss(tokens, near, now, far.logprobs, config, far.topk)
            scores = engine.accumulate(micro, temperature, loss, candidates=far.ids)
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
    gauges = penalties | gauges
    return {"learner/grad_norm": grad_norm, "learner/lr": lr} | gauges


def looks_ahead(config: LearnerConfig) -> bool:
    """True where the loss of a token needs the current log-probs of its whole sequence, or rollout:
    one pass more.
    """
    if config.kl_in == "reward":
        return True
    if config.objective == "gspo" and config.centre != "start_of_update":
        return True  # at the start of the update its sequence's ratio is 1
    if config.behaviour_level == "token" or config.centre == "ema":
        return False
    if config.kl_coef and config.kl_weight != "none" and config.centre == "start_of_update":
        return True
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
    tokens: ActionTokens,
    reference: Tensor | None,
    config: LearnerConfig,
    topk: kl.TopK | None = None,
) -> ChunkLoss:
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
) -> TokenLoss:
    """The loss of these tokens, from log-probs float[n] without gradient: the average's where that
    is the centre, current where it is not or `looks_ahead`, and the anchor's where there is one,
    with its candidates where there are some.

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
    sequence = _sequence_log_ratio(current, proximal, rows, usable, config)
    return TokenLoss(
        objective=objective,
        bounds=bounds,
        terms=Terms(proximal, behaviour, tokens.advantages, sequence),
        weights=weights,
        coefficients=tokens.coefficients,
        reference=reference,
        kl_estimator=config.kl_estimator or ("k1" if config.kl_in == "reward" else "k3++"),
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        kl_cap=config.behaviour_cap,
        kl_ratios=_kl_ratios(proximal, tokens, usable, config),
        topk=topk,
    )


def _sequence_log_ratio(
    current: Tensor | None, proximal: Tensor, rows: Tensor, usable: Tensor, config: LearnerConfig
) -> Tensor:
    """The mean of current − proximal over each token's sequence, where the objective needs it."""
    if config.objective != "gspo" or current is proximal:
        return torch.zeros_like(proximal)
    assert current is not None
    return sequence_means(log_ratio(current, proximal, usable), rows, usable)[rows]


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


def penalise(
    engine: "Engine",
    batch: TrainingBatch,
    micro_batches: list[MicroBatch],
    current: Sequence[Tensor | None],
    anchors: Sequence[Anchored],
    config: LearnerConfig,
) -> tuple[list[MicroBatch], dict[str, float]]:
    """The micro-batches with the advantages of rewards that the KL of the whole rollout is taken
    off, wherever its rows lie, and the gauges that say so.
    """
    rollouts = torch.tensor(batch.rollouts, device=engine.device)
    rewards = [torch.tensor(group, dtype=torch.float64) for group in batch.rewards]
    sums = torch.zeros(sum(map(len, rewards)), dtype=torch.float64, device=engine.device)
    for micro, now, far in zip(micro_batches, current, anchors, strict=True):
        assert now is not None and far.logprobs is not None
        sums.index_add_(0, rollouts[micro.row_ids[micro.rows]], (now - far.logprobs).double())
    totals = torch.tensor(engine.total(sums.tolist()), dtype=torch.float64)
    credit = credit_of(kl.penalised(rewards, totals, config.kl_coef), config)
    flat = torch.tensor(list(chain.from_iterable(credit)), dtype=torch.float32)
    own = flat.to(engine.device)[rollouts]
    penalised = [
        replace(micro, advantages=own[micro.row_ids].unsqueeze(-1) * micro.loss_mask)
        for micro in micro_batches
    ]
    penalty = {"learner/kl_penalty": config.kl_coef * float(totals.mean())}
    return penalised, penalty | credit_gauges(credit)

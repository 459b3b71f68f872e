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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm.guard import guarded
from learner.algorithm.importance import (
    behaviour_ratio,
    behaviour_weights,
    log_ratio,
    sequence_means,
)
from learner.algorithm.loss import TokenLoss
from learner.algorithm.objectives import ClipBounds, Terms, choose, moment_bounds
from learner.algorithm.rejection import accepted, over_sequences
from learner.algorithm.schedule import learning_rate, scaled_rate
from learner.batch import TrainingBatch, credit_gauges, credit_of
from learner.diagnostics import TokenFacts, diagnose
from learner.errors import Diverged
from learner.model.ema import Averages, Ema
from learner.model.head import ChunkLoss
from learner.packing import MicroBatch

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.model.engine import Engine


def update(
    engine: "Engine", averages: Averages, batch: TrainingBatch, config: LearnerConfig
) -> dict[str, float]:
    """Take one step on the batch, which makes version `batch.step`; return its gauges.

    Raises Diverged on a non-finite loss or gradient.
    """
    step, micro_batches = batch.step, [m.to(engine.device) for m in batch.micro_batches]
    temperature = batch.temperature
    current = logprobs_ahead(engine, micro_batches, temperature, config)
    nears = logprobs_under(engine, averages.proximal, micro_batches, temperature)
    anchors = logprobs_under(engine, averages.anchor, micro_batches, temperature)
    recredited: dict[str, float] = {}
    if config.baseline == "optimal":
        micro_batches, recredited = recredit(engine, batch, micro_batches, current, config)
    bounds = step_bounds(engine, micro_batches, nears, current, config)
    facts = []
    for micro, near, now, far in zip(micro_batches, nears, current, anchors, strict=True):
        tokens = ActionTokens.of(micro)
        if near is None and now is None:
            unscored = loss_as_scored(tokens, far, config)
            scores = engine.accumulate(micro, temperature, unscored, bonus(tokens, config))
            loss = token_loss(tokens, None, scores.logprobs, far, config)
        else:
            loss = token_loss(tokens, near, now, far, config, bounds)
            scores = engine.accumulate(micro, temperature, loss, bonus(tokens, config))
        facts.append(TokenFacts.of(micro, loss, scores, config))
    gauges = diagnose(engine.gather(facts), config)
    if not math.isfinite(gauges["learner/loss"]):
        raise Diverged(f"step {step}: the loss is {gauges['learner/loss']}")
    ess = gauges.get("learner/current_ess_sequence", 1.0)
    lr = scaled_rate(learning_rate(step, config), ess, config.ess_base)
    grad_norm = engine.step(lr)
    if not math.isfinite(grad_norm):
        raise Diverged(f"step {step}: the gradient's norm is {grad_norm}")
    averages.update(engine)
    gauges |= averages.gauges(batch.gauges.get("replay/staleness", 0.0))
    gauges = batch.gauges | recredited | gauges
    return {"learner/grad_norm": grad_norm, "learner/lr": lr} | gauges


def logprobs_ahead(
    engine: "Engine", micro_batches: list[MicroBatch], temperature: float, config: LearnerConfig
) -> list[Tensor | None]:
    """float32[N] per micro-batch: its action tokens under the current weights; None where the loss
    can be made of what its own pass tells.
    """
    if not looks_ahead(config):
        return [None] * len(micro_batches)
    return [engine.score(micro, temperature).logprobs for micro in micro_batches]


def looks_ahead(config: LearnerConfig) -> bool:
    """True where the loss of a token needs the current log-probs of its whole sequence, or of the
    whole step: one pass more.
    """
    if config.guard != "none" or config.baseline == "optimal" or config.second_moment is not None:
        return True
    if config.objective == "gspo" and config.centre != "start_of_update":
        return True  # at the start of the update its sequence's ratio is 1
    if config.centre == "ema":
        return False
    if over_sequences(config.rejection):
        return True
    if config.behaviour_level == "token":
        return False
    rules = ("mask",) if config.centre == "behaviour" else ("mask", "truncate")
    return config.behaviour_weight in rules


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
    bounds: ClipBounds | None = None,
) -> TokenLoss:
    """The loss of these tokens, from log-probs float[n] without gradient: the average's where that
    is the centre, current where it is not or `looks_ahead`, and the anchor's where there is one.

    Tokens without a finite behaviour log-prob get weight 0 and finite terms; coefficients are the
    batch's and stay. `bounds`: the step's own, in place of the configured ones.
    """
    objective, configured, _ = choose(config)
    rows, recorded = tokens.rows, tokens.recorded
    usable = recorded.isfinite()
    behaviour = torch.where(usable, recorded, 0.0)
    if config.centre == "behaviour":
        proximal = behaviour
    elif proximal is None:
        proximal = current
    assert proximal is not None
    sequence = torch.zeros_like(behaviour)
    if config.objective == "gspo" and current is not proximal:
        assert current is not None
        drift = log_ratio(current, proximal, usable)
        sequence = sequence_means(drift, rows, usable)[rows]
    return TokenLoss(
        objective=objective,
        bounds=configured if bounds is None else bounds._replace(cap=configured.cap),
        terms=Terms(proximal, behaviour, tokens.advantages, sequence),
        weights=_acting(tokens, current, proximal, usable, config),
        coefficients=tokens.coefficients,
        reference=reference,
        kl_estimator=config.kl_estimator,
        kl_coef=config.kl_coef,
        kl_cap=config.behaviour_cap,
        guards=_guards(tokens, current, usable, config) if config.guard != "none" else None,
    )


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


def logprobs_under(
    engine: "Engine", ema: Ema | None, micro_batches: list[MicroBatch], temperature: float
) -> list[Tensor | None]:
    """float32[N] per micro-batch: its action tokens under averaged weights; None without any."""
    if ema is None:
        return [None] * len(micro_batches)
    with ema.swapped_in(engine):
        return [engine.score(micro, temperature).logprobs for micro in micro_batches]


@dataclass(frozen=True, slots=True)
class Moved:
    """One micro-batch's N action tokens; every field is [N] and has no gradient."""

    log_ratio: Tensor  # current − proximal; 0 where not usable
    advantages: Tensor


def step_bounds(
    engine: "Engine",
    micro_batches: list[MicroBatch],
    nears: Sequence[Tensor | None],
    current: Sequence[Tensor | None],
    config: LearnerConfig,
) -> ClipBounds | None:
    """The clip bounds that all tokens of the step have together; None: the configured ones."""
    if config.second_moment is None:
        return None
    moved = []
    for micro, near, now in zip(micro_batches, nears, current, strict=True):
        assert now is not None
        recorded = micro.behaviour_logprobs[micro.loss_mask]
        old, usable = recorded if near is None else near, recorded.isfinite()
        moved.append(Moved(log_ratio(now, old, usable), micro.advantages[micro.loss_mask]))
    gathered = engine.gather(moved)
    log_ratios = torch.cat([part.log_ratio for part in gathered])
    advantages = torch.cat([part.advantages for part in gathered])
    return moment_bounds(log_ratios, advantages, config.second_moment)


def recredit(
    engine: "Engine",
    batch: TrainingBatch,
    micro_batches: list[MicroBatch],
    current: Sequence[Tensor | None],
    config: LearnerConfig,
) -> tuple[list[MicroBatch], dict[str, float]]:
    """The micro-batches with the advantages that follow from how much likelier each rollout has
    become, wherever its rows lie, and the gauges that say so.
    """
    rollouts = torch.tensor(batch.rollouts, device=engine.device)
    sums = torch.zeros(sum(map(len, batch.rewards)), dtype=torch.float64, device=engine.device)
    for micro, now in zip(micro_batches, current, strict=True):
        assert now is not None
        recorded = micro.behaviour_logprobs[micro.loss_mask]
        moved = log_ratio(now, recorded, recorded.isfinite()).double()
        sums.index_add_(0, rollouts[micro.row_ids[micro.rows]], moved)
    totals = torch.tensor(engine.total(sums.tolist()), dtype=torch.float64)
    rewards = [torch.tensor(group, dtype=torch.float64) for group in batch.rewards]
    counts = [torch.tensor(group) for group in batch.action_counts]
    log_ratios = totals.split([len(group) for group in rewards])
    credit = credit_of(rewards, counts, log_ratios, config)
    flat = torch.tensor(list(chain.from_iterable(credit)), dtype=torch.float32)
    own = flat.to(engine.device)[rollouts]
    recredited = [
        replace(micro, advantages=own[micro.row_ids].unsqueeze(-1) * micro.loss_mask)
        for micro in micro_batches
    ]
    return recredited, credit_gauges(credit)

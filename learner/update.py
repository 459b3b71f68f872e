"""One optimiser step: what the other policies say of the batch, credit, corrected loss, gradient,
step, averages.

Every sum and ratio skips tokens that the policy did not sample. Which weight enters where:
`learner/algorithm/correction.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm import kl
from learner.algorithm.correction import (
    ActionTokens,
    bonus,
    loss_as_scored,
    token_loss,
)
from learner.algorithm.importance import log_ratio
from learner.algorithm.objectives import ClipBounds, moment_bounds
from learner.algorithm.passes import looks_ahead, scores_current
from learner.algorithm.schedule import scaled_rate
from learner.batch import TrainingBatch, credit_gauges, credit_of
from learner.errors import Diverged
from learner.health.diagnostics import TokenFacts, diagnose
from learner.health.tokens import SequenceKey
from learner.model.anchor import Anchored, anchored
from learner.model.credit import Critic, Lessons, critic_rate, judge, policy_rate, teach
from learner.model.ema import Averages, Ema
from learner.model.head import ValueLoss
from learner.packing import MicroBatch

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.model.engine import Engine


# Is given a step, its batch's sequences, and the facts of its tokens, of all ranks
Note = Callable[[int, Sequence[SequenceKey], Sequence[TokenFacts]], None]


class Scored(NamedTuple):
    """A micro-batch's N action tokens before the step, float32[N]; None where its loss is made
    without.
    """

    proximal: Tensor | None
    current: Tensor | None
    anchor: Anchored
    values: Tensor | None = None  # float[B, T], of a critic on the policy's trunk


def update(
    engine: "Engine",
    averages: Averages,
    batch: TrainingBatch,
    config: LearnerConfig,
    critic: Critic | None = None,
    note: Note | None = None,
) -> dict[str, float]:
    """Take one step on the batch, which makes version `batch.step`; return its gauges.

    `critic`: where `learner.baseline: critic` has a model of its own; `note` is given what the loss
    is made of. Raises Diverged on a non-finite loss or gradient.
    """
    micro_batches = [micro.to(engine.device) for micro in batch.micro_batches]
    scored = score(engine, averages, micro_batches, batch.temperature, config)
    if config.baseline != "critic":
        credited, credit = recredit(engine, batch, micro_batches, scored, config)
        gauges = batch.gauges | credit
        return gauges | _step(engine, averages, batch, credited, scored, config, note)
    penalties, taken = penalise(engine, batch, micro_batches, scored, config)
    values = values_under(critic, micro_batches, scored)
    judged, judgements, credit = judge(engine, micro_batches, values, config, penalties)
    gauges = batch.gauges | taken | credit
    if critic is None:
        lessons = Lessons(judged, judgements, config)
        return gauges | _step(engine, averages, batch, judged, scored, config, note, lessons)
    gauges |= _step(engine, averages, batch, judged, scored, config, note)
    return gauges | teach(critic, judged, judgements, batch.step, config)


def _step(
    engine: "Engine",
    averages: Averages,
    batch: TrainingBatch,
    micro_batches: list[MicroBatch],
    scored: Sequence[Scored],
    config: LearnerConfig,
    note: Note | None,
    lessons: Lessons | None = None,
) -> dict[str, float]:
    """The policy's step on these micro-batches of the batch, whose advantages are known; a critic
    on its trunk has its `lessons` in it.
    """
    step, bounds = batch.step, step_bounds(engine, micro_batches, scored, config)
    facts = []
    for number, (micro, known) in enumerate(zip(micro_batches, scored, strict=True)):
        lesson = None if lessons is None else lessons.of(number)
        facts.append(_accumulate(engine, micro, known, batch.temperature, bounds, config, lesson))
    gathered = engine.gather(facts)
    if note:
        note(step, batch.sequences, gathered)
    gauges = diagnose(gathered, config)
    if not math.isfinite(gauges["learner/loss"]):
        raise Diverged(f"step {step}: the loss is {gauges['learner/loss']}")
    ess = gauges.get("learner/current_ess_sequence", 1.0)
    rates = [lr := scaled_rate(policy_rate(step, config), ess, config.ess_base)]
    if lessons is not None:
        gauges |= lessons.gauges(engine, step)
        rates.append(critic_rate(step, config))
        gauges["learner/critic_lr"] = rates[-1]
    grad_norm = engine.step(*rates)
    if not math.isfinite(grad_norm):
        raise Diverged(f"step {step}: the gradient's norm is {grad_norm}")
    averages.update(engine)
    gauges |= averages.gauges(batch.gauges.get("replay/staleness", 0.0))
    return {"learner/grad_norm": grad_norm, "learner/lr": lr} | gauges


def _accumulate(
    engine: "Engine",
    micro: MicroBatch,
    scored: Scored,
    temperature: float,
    bounds: ClipBounds | None,
    config: LearnerConfig,
    value_loss: ValueLoss | None = None,
) -> TokenFacts:
    """Add the gradient of a micro-batch."""
    tokens, (near, now, far, _) = ActionTokens.of(micro), scored
    more = {"candidates": far.ids, "value_loss": value_loss}
    given, own = (far.logprobs, config, far.topk), bonus(tokens, config)
    if near is None and now is None:
        unscored = loss_as_scored(tokens, *given)
        scores = engine.accumulate(micro, temperature, unscored, own, **more)
        loss = token_loss(tokens, None, scores.logprobs, *given)
    else:
        loss = token_loss(tokens, near, now, *given, bounds=bounds)
        scores = engine.accumulate(micro, temperature, loss, own, **more)
    return TokenFacts.of(micro, loss, scores, config)


def score(
    engine: "Engine",
    averages: Averages,
    micro_batches: list[MicroBatch],
    temperature: float,
    config: LearnerConfig,
) -> list[Scored]:
    """What the policies that a step needs say of its tokens: a pass of each, without gradient."""
    current: list[Tensor | None] = [None] * len(micro_batches)
    values = list(current)
    if scores_current(config):
        own = [engine.score(micro, temperature) for micro in micro_batches]
        values = [each.values for each in own]
        if looks_ahead(config):
            current = [each.logprobs for each in own]
    nears = logprobs_under(engine, averages.proximal, micro_batches, temperature)
    anchors = anchored(engine, averages.anchor, micro_batches, temperature, config)
    return list(map(Scored, nears, current, anchors, values))


def values_under(
    critic: Critic | None, micro_batches: Sequence[MicroBatch], scored: Sequence[Scored]
) -> list[Tensor]:
    """A critic's values float[B, T] of each micro-batch, without gradient: in a pass of its own, or
    on the policy's trunk as its pass found them.
    """
    if critic is not None:
        return [critic.values(micro) for micro in micro_batches]
    found = [each.values for each in scored if each.values is not None]
    assert len(found) == len(micro_batches)
    return found


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
    scored: Sequence[Scored],
    config: LearnerConfig,
) -> ClipBounds | None:
    """The clip bounds that all tokens of the step have together; None: the configured ones."""
    if config.second_moment is None:
        return None
    moved = []
    for micro, (near, now, *_) in zip(micro_batches, scored, strict=True):
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
    scored: Sequence[Scored],
    config: LearnerConfig,
) -> tuple[list[MicroBatch], dict[str, float]]:
    """The micro-batches with the advantages that follow from what the policies say of each whole
    rollout, wherever its rows lie, and the gauges that say so; both as given where none does.
    """
    in_reward, optimal = config.kl_in == "reward", config.baseline == "optimal"
    if not (in_reward or optimal):
        return micro_batches, {}
    rewards = [torch.tensor(group, dtype=torch.float64) for group in batch.rewards]
    log_ratios: Sequence[Tensor] = ()
    gauges: dict[str, float] = {}
    if optimal:
        moved = [_moved(micro, each) for micro, each in zip(micro_batches, scored, strict=True)]
        totals = _over_rollouts(engine, batch, micro_batches, moved)
        log_ratios = totals.split([len(group) for group in rewards])
    if in_reward:
        totals = _over_rollouts(engine, batch, micro_batches, list(map(_k1, scored)))
        rewards = kl.penalised(rewards, totals, config.kl_coef)
        gauges["learner/kl_penalty"] = config.kl_coef * float(totals.mean())
    counts = [torch.tensor(group) for group in batch.action_counts]
    credit = credit_of(rewards, counts, log_ratios, config)
    flat = torch.tensor(list(chain.from_iterable(credit)), dtype=torch.float32)
    own = flat.to(engine.device)[torch.tensor(batch.rollouts, device=engine.device)]
    recredited = [
        replace(micro, advantages=own[micro.row_ids].unsqueeze(-1) * micro.loss_mask)
        for micro in micro_batches
    ]
    return recredited, gauges | credit_gauges(credit)


def penalise(
    engine: "Engine",
    batch: TrainingBatch,
    micro_batches: list[MicroBatch],
    scored: Sequence[Scored],
    config: LearnerConfig,
) -> tuple[list[Tensor] | None, dict[str, float]]:
    """What the KL takes off the reward of each token, float[N] of a micro-batch, and the gauge that
    says so; None where it is not in the reward.
    """
    if config.kl_in != "reward":
        return None, {}
    penalties = [config.kl_coef * _k1(each) for each in scored]
    totals = _over_rollouts(engine, batch, micro_batches, penalties)
    return penalties, {"learner/kl_penalty": float(totals.mean())}


def _moved(micro: MicroBatch, scored: Scored) -> Tensor:
    """current − behaviour, float[N]; 0 where that was not recorded."""
    assert scored.current is not None
    recorded = micro.behaviour_logprobs[micro.loss_mask]
    return log_ratio(scored.current, recorded, recorded.isfinite())


def _k1(scored: Scored) -> Tensor:
    """current − anchor, float[N]."""
    assert scored.current is not None and scored.anchor.logprobs is not None
    return scored.current - scored.anchor.logprobs


def _over_rollouts(
    engine: "Engine",
    batch: TrainingBatch,
    micro_batches: list[MicroBatch],
    values: Sequence[Tensor],
) -> Tensor:
    """float64[rollouts]: the sums of the tokens' values float[N], over all ranks."""
    rollouts = torch.tensor(batch.rollouts, device=engine.device)
    sums = torch.zeros(sum(map(len, batch.rewards)), dtype=torch.float64, device=engine.device)
    for micro, own in zip(micro_batches, values, strict=True):
        sums.index_add_(0, rollouts[micro.row_ids[micro.rows]], own.double())
    return torch.tensor(engine.total(sums.tolist()), dtype=torch.float64)

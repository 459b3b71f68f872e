"""The critic's part of a step: before the policy's it judges the batch, after it it is taught.

`judge` makes advantages and returns of the values as they are; `teach` moves the values towards
those returns, or `Lessons` do, on the policy's trunk, within the policy's own step. What is not on
the loss mask, and rollouts that nobody could score, are in none of them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm.advantage import whitened
from learner.algorithm.gae import gae, value_losses
from learner.algorithm.schedule import learning_rate
from learner.errors import Diverged
from learner.model.head import ValueLoss
from learner.packing import MicroBatch

COEF = 0.1  # of the value loss beside the policy's; TRL's


class Summing(Protocol):
    """An engine, or something smaller that knows of all ranks."""

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of these numbers over all ranks."""
        ...


class Critic(Summing, Protocol):
    """The critic's engine, or something smaller that takes the same micro-batches."""

    def values(self, micro: MicroBatch) -> Tensor:
        """Values float[B, T] before each token, without gradient."""
        ...

    def accumulate(self, micro: MicroBatch, loss: ValueLoss) -> Tensor:
        """Add the gradient of a loss of the values; return them, detached."""
        ...

    def step(self, lr: float) -> float:
        """Clip, step, clear the gradients; return their norm."""
        ...


class Judgement(NamedTuple):
    """A micro-batch's values and what they come to, float[B, T] on the CPU; bool `mask`: the tokens
    that are judged.
    """

    mask: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def judge(
    engine: Summing,
    micro_batches: Sequence[MicroBatch],
    values: Sequence[Tensor],
    config: LearnerConfig,
    penalties: Sequence[Tensor] | None = None,
) -> tuple[list[MicroBatch], list[Judgement], dict[str, float]]:
    """The micro-batches with their advantages, the judgements that the critic is taught by, and
    gauges, from its `values` float[B, T] of each. `penalties` float[N] are taken off what each
    action token of a micro-batch earns.
    """
    judgements = [
        _judgement(micro, own, None if penalties is None else penalties[i], config)
        for i, (micro, own) in enumerate(zip(micro_batches, values, strict=True))
    ]
    moments = _moments(engine, judgements)
    judged = []
    for micro, each in zip(micro_batches, judgements, strict=True):
        credit = each.advantages
        if config.advantage_std == "whiten":
            mean, variance = moments["advantages"]
            credit = whitened(credit, each.mask, mean=mean, variance=variance)
        judged.append(replace(micro, advantages=credit.to(micro.advantages)))
    return judged, judgements, _gauges(moments)


def teach(
    critic: Critic,
    micro_batches: Sequence[MicroBatch],
    judgements: Sequence[Judgement],
    step: int,
    config: LearnerConfig,
) -> dict[str, float]:
    """Take the critic's steps on a judged batch; return its gauges. Raises Diverged."""
    lr, clip, first = critic_rate(step, config), config.critic.value_clip, math.nan
    pairs = list(zip(micro_batches, judgements, strict=True))
    for number in range(config.critic.updates):
        tallies = [_accumulate(critic, micro, judged, clip) for micro, judged in pairs]
        loss, clipped, tokens = critic.total([sum(each) for each in zip(*tallies, strict=True)])
        norm = critic.step(lr)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise Diverged(f"step {step}: the critic's loss is {loss}, its gradient's norm {norm}")
        first = loss if number == 0 else first
    return {
        "learner/value_loss": first,
        "learner/value_clip_fraction": clipped / max(tokens, 1.0),
        "learner/critic_grad_norm": norm,
        "learner/critic_lr": lr,
    }


class Lessons:
    """What a critic on the policy's trunk learns in the policy's own step: of each micro-batch a
    loss that is added to the policy's.
    """

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        judgements: Sequence[Judgement],
        config: LearnerConfig,
    ) -> None:
        self._pairs = list(zip(micro_batches, judgements, strict=True))
        self._coef = COEF if config.critic.coef is None else config.critic.coef
        self._taught = [0.0] * len(self._pairs)

    def of(self, number: int) -> ValueLoss:
        """The loss of a micro-batch's values, times its coefficient beside the policy's."""

        def loss(values: Tensor) -> Tensor:
            made, _ = _value_loss(values, *self._pairs[number], None)
            self._taught[number] = float(made.detach())
            return self._coef * made

        return loss

    def gauges(self, engine: Summing, step: int) -> dict[str, float]:
        """The value loss of the whole step, once all are taught. Raises Diverged."""
        (loss,) = engine.total([sum(self._taught)])
        if not math.isfinite(loss):
            raise Diverged(f"step {step}: the critic's loss is {loss}")
        return {"learner/value_loss": loss}


def critic_rate(step: int, config: LearnerConfig) -> float:
    """The critic's rate of optimiser step `step`: by the learner's schedule, from its own."""
    given = config.critic
    own = msgspec.structs.replace(config, lr=given.lr, warmup_steps=given.warmup_steps)
    return learning_rate(step, own)


def policy_rate(step: int, config: LearnerConfig) -> float:
    """The policy's: 0 while the critic learns alone."""
    return 0.0 if step <= config.critic.alone_steps else learning_rate(step, config)


def _judgement(
    micro: MicroBatch, values: Tensor, penalties: Tensor | None, config: LearnerConfig
) -> Judgement:
    mask = (micro.loss_mask & ~micro.rewards.isnan().any(1, keepdim=True)).cpu()
    values, rewards = values.double().cpu(), micro.rewards.double().cpu()
    if penalties is not None:
        rewards[micro.loss_mask.cpu()] -= penalties.double().cpu()
    advantages, returns = gae(
        rewards,
        values,
        mask,
        gamma=config.critic.gamma,
        gae_lambda=config.critic.gae_lambda,
    )
    return Judgement(mask, values, advantages, returns)


def _accumulate(
    critic: Critic, micro: MicroBatch, judged: Judgement, clip: float | None
) -> tuple[float, float, float]:
    """Add the gradient; the loss, each token's by the coefficient of its sequence, how many tokens
    were clipped, and of how many.
    """
    values = critic.accumulate(micro, lambda values: _value_loss(values, micro, judged, clip)[0])
    made, clipped = _value_loss(values, micro, judged, clip)
    return float(made), float(clipped.sum()), float(judged.mask.sum())


def _value_loss(
    values: Tensor, micro: MicroBatch, judged: Judgement, clip: float | None
) -> tuple[Tensor, Tensor]:
    """The loss of values [B, T], each token's by the coefficient of its sequence; and where the
    clip decided.
    """
    mask = judged.mask.to(values.device)
    old, returns = judged.values.to(values), judged.returns.to(values)
    each, clipped = value_losses(values, old, returns, mask, clip)
    return (each * micro.coefficients[:, None]).sum(), clipped


def _moments(engine: Summing, judgements: Sequence[Judgement]) -> dict[str, tuple[float, float]]:
    """Mean and variance (Bessel-corrected) of values, advantages, their magnitudes and returns over
    the judged tokens of all ranks; 0 of too few.
    """
    names = ("values", "advantages", "returns", "magnitudes")
    found = [torch.cat([getattr(j, name)[j.mask] for j in judgements]) for name in names[:3]]
    columns = torch.stack([*found, found[1].abs()])
    count, *sums = engine.total([float(columns.shape[1]), *columns.sum(1).tolist()])
    means = [each / max(count, 1.0) for each in sums]
    apart = columns - torch.tensor(means, dtype=columns.dtype)[:, None]
    squares = engine.total(apart.square().sum(1).tolist())
    variances = [each / max(count - 1.0, 1.0) for each in squares]
    return dict(zip(names, zip(means, variances, strict=True), strict=True))


def _gauges(moments: dict[str, tuple[float, float]]) -> dict[str, float]:
    """`learner/explained_variance`: 1 − Var(returns − values) / Var(returns)."""
    mean, variance = moments["advantages"]
    gauges = {
        "learner/value_mean": moments["values"][0],
        "learner/advantage_mean": mean,  # before they are whitened
        "learner/advantage_abs": moments["magnitudes"][0],
    }
    if (spread := moments["returns"][1]) > 0.0:
        gauges["learner/explained_variance"] = 1.0 - variance / spread
    return gauges

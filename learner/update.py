"""One optimiser step: proximal log-probs, clipped and weighted loss, gradient, step, EMA.

Consumes a TrainingBatch, produces version `batch.step` in the engine and `learner/*` numbers. Every
sum and ratio skips tokens that the policy did not sample.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.batch import TrainingBatch
from learner.ema import Ema
from learner.errors import Diverged
from learner.importance import behaviour_ratio, effective_sample_size, finite_mask
from learner.objectives.grpo import grpo_loss, token_mean
from learner.packing import MicroBatch
from learner.schedule import learning_rate

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.engine import Engine


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What one micro-batch leaves for the diagnostics, at its N action tokens, detached."""

    loss: Tensor
    ratio: Tensor  # untruncated behaviour ratio
    usable: Tensor  # bool: the behaviour log-prob is finite
    clipped: Tensor
    current: Tensor
    behaviour: Tensor
    entropy: Tensor
    advantages: Tensor
    staleness: Tensor


def update(
    engine: "Engine", ema: Ema, batch: TrainingBatch, config: LearnerConfig
) -> dict[str, float]:
    """Take one step on the batch and return its gauges. Raises Diverged on a non-finite loss or
    gradient.
    """
    step = batch.step
    proximal = proximal_logprobs(engine, ema, batch)
    tokens = [
        _accumulate(engine, batch, micro, logprobs, config)
        for micro, logprobs in zip(batch.micro_batches, proximal, strict=True)
    ]
    loss = float(sum(t.loss.double().sum() for t in tokens)) / batch.action_tokens
    if not math.isfinite(loss):
        raise Diverged(f"step {step}: the loss is {loss}")
    lr = learning_rate(step, config)
    grad_norm = engine.step(lr)
    if not math.isfinite(grad_norm):
        raise Diverged(f"step {step}: the gradient's norm is {grad_norm}")
    ema.update(engine)
    gauges = {"learner/loss": loss, "learner/grad_norm": grad_norm, "learner/lr": lr}
    return gauges | batch.gauges | _diagnostics(tokens, config)


@torch.no_grad()
def proximal_logprobs(engine: "Engine", ema: Ema, batch: TrainingBatch) -> list[Tensor]:
    """float32[B, T] per micro-batch: its action tokens under the lagged average of the weights."""
    with ema.swapped_in(engine):
        return [engine.score(micro, batch.temperature).logprobs for micro in batch.micro_batches]


def _accumulate(
    engine: "Engine",
    batch: TrainingBatch,
    micro: MicroBatch,
    proximal: Tensor,
    config: LearnerConfig,
) -> _Tokens:
    scores = engine.score(micro, batch.temperature)
    device = scores.logprobs.device
    behaviour = micro.behaviour_logprobs.to(device)
    advantages = micro.advantages.to(device)
    loss_mask = micro.loss_mask.to(device)
    usable = finite_mask(behaviour, loss_mask)
    result = grpo_loss(
        scores.logprobs,
        proximal,
        advantages,
        behaviour_ratio(proximal, behaviour, usable, config.behaviour_cap),
        usable,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    engine.backward(token_mean(result.losses, batch.action_tokens))
    ratio = behaviour_ratio(proximal, behaviour, usable)
    return _Tokens(
        loss=result.losses.detach()[loss_mask],
        ratio=ratio[loss_mask],
        usable=usable[loss_mask],
        clipped=result.clipped[loss_mask],
        current=scores.logprobs.detach()[loss_mask],
        behaviour=behaviour[loss_mask],
        entropy=scores.entropy[loss_mask],
        advantages=advantages[loss_mask],
        staleness=micro.staleness.to(device)[loss_mask],
    )


def _diagnostics(parts: list[_Tokens], config: LearnerConfig) -> dict[str, float]:
    """Numbers over the whole step's action tokens; ratios over those with a finite behaviour
    log-prob.
    """
    tokens = _Tokens(
        *(
            torch.cat([getattr(part, name) for part in parts])
            for name in _Tokens.__dataclass_fields__
        )
    )
    usable = tokens.usable
    gauges = {
        "learner/entropy": tokens.entropy.mean(),
        "learner/clip_fraction": tokens.clipped.double().mean(),
        "learner/masked_tokens": (~usable).sum(),
    }
    if usable.any():
        ratio = tokens.ratio[usable]
        gauges |= {
            "learner/behaviour_ratio_mean": ratio.mean(),
            "learner/behaviour_ratio_max": ratio.max(),
            "learner/truncated_fraction": (ratio > config.behaviour_cap).double().mean(),
            "learner/ess": effective_sample_size(tokens.ratio, usable),
        }
    # Same weights on both sides: what is left is the difference between the two implementations.
    fresh = usable & (tokens.staleness == 0)
    if fresh.any():
        mismatch = (tokens.current - tokens.behaviour)[fresh].abs()
        gauges |= {"learner/mismatch": mismatch.mean(), "learner/mismatch_max": mismatch.max()}
    return {name: float(value) for name, value in gauges.items()}

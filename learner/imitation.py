"""Imitation of demonstrations: −log p of what the policy writes, averaged over its tokens.

A demonstration is a list of segments of tokens. Those that the policy reads (prompts, observations)
condition what it writes and are in no sum.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm.loss import row_coefficients
from learner.batch import TrainingBatch
from learner.errors import Diverged
from learner.model.head import ChunkLoss
from learner.model.scorer import TokenScores
from learner.packing import MicroBatch, Row, pack_shares, pad

Segment = tuple[Sequence[int] | NDArray[np.int32], bool]  # tokens; true: the policy writes them
TEMPERATURE = 1.0


class Imitator(Protocol):
    """The engine, or something smaller that takes the same micro-batches."""

    device: torch.device

    def score(self, micro: MicroBatch, temperature: float) -> TokenScores:
        """Log-probs of the trained tokens, without gradient."""
        ...

    def accumulate(self, micro: MicroBatch, temperature: float, loss: ChunkLoss) -> TokenScores:
        """Log-probs of the trained tokens; the gradient of their loss is added."""
        ...

    def step(self, lr: float) -> float:
        """Clip, step, clear the gradients; return their norm."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of these numbers over all ranks."""
        ...


def lay_out(demonstrations: Sequence[Sequence[Segment]]) -> list[Row]:
    """The rows of one step, in the order given; each token that the policy writes counts alike.

    Raises ValueError for a demonstration that does not begin with something to read: nothing would
    predict its first token.
    """
    counts = [sum(len(tokens) for tokens, own in each if own) for each in demonstrations]
    coefficients = row_coefficients(counts, "token_mean", 0)
    return [_row(*each) for each in zip(demonstrations, coefficients, strict=True)]


def share_out(
    demonstrations: Sequence[Sequence[Segment]], step: int, config: LearnerConfig
) -> tuple[TrainingBatch, ...]:
    """A step's demonstrations for `config.ranks` ranks, as `learner.batch` shares out rollouts."""
    rows = lay_out(demonstrations)
    packed = pack_shares([len(row) for row in rows], config.micro_batch_tokens, config.ranks)
    shares = [tuple(pad(row_ids, rows) for row_ids in share) for share in packed]
    tokens = sum(len(row) for row in rows)
    gauges = {
        "learner/sequences": float(len(rows)),
        "learner/tokens": float(tokens),
        "learner/action_tokens": float(sum(int(row.loss_mask.sum()) for row in rows)),
        "learner/fill": tokens / sum(m.tokens.numel() for m in chain.from_iterable(shares)),
    }
    return tuple(
        TrainingBatch(step, TEMPERATURE, share, {} if rank else gauges)
        for rank, share in enumerate(shares)
    )


def imitate(engine: Imitator, share: TrainingBatch, lr: float) -> dict[str, float]:
    """Take one step on this rank's share; return its gauges. Raises Diverged where not finite."""
    own = 0.0
    for micro in share.micro_batches:
        placed = micro.to(engine.device)
        scores = engine.accumulate(placed, share.temperature, _loss_of(placed))
        own += _value(placed, scores.logprobs)
    (loss,) = engine.total([own])
    if not math.isfinite(loss):
        raise Diverged(f"step {share.step}: the loss is {loss}")
    norm = engine.step(lr)
    if not math.isfinite(norm):
        raise Diverged(f"step {share.step}: the gradient's norm is {norm}")
    return {**share.gauges, "learner/loss": loss, "learner/grad_norm": norm, "learner/lr": lr}


def measure(engine: Imitator, share: TrainingBatch) -> float:
    """The loss of all ranks' shares; nothing is learnt from them."""
    placed = [micro.to(engine.device) for micro in share.micro_batches]
    own = sum(_value(micro, engine.score(micro, share.temperature).logprobs) for micro in placed)
    (loss,) = engine.total([own])
    return loss


def _row(segments: Sequence[Segment], coefficient: float) -> Row:
    if not segments or segments[0][1] or not len(segments[0][0]):
        raise ValueError("a demonstration begins with tokens that the policy reads")
    lengths = [len(tokens) for tokens, _ in segments]
    length = sum(lengths)
    return Row(
        tokens=np.concatenate([np.asarray(tokens, np.int64) for tokens, _ in segments]),
        loss_mask=np.repeat([own for _, own in segments], lengths),
        behaviour_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        staleness=np.zeros(length, np.int32),
        rewards=np.zeros(length, np.float32),
        coefficient=coefficient,
    )


def _loss_of(micro: MicroBatch) -> ChunkLoss:
    coefficients = micro.coefficients[micro.rows]
    return lambda logprobs, chunk: -(coefficients[chunk] * logprobs).sum()


def _value(micro: MicroBatch, logprobs: Tensor) -> float:
    return -float((micro.coefficients[micro.rows].double() * logprobs.double()).sum())

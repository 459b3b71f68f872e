"""A batch under the KL anchor: its own tokens and, for a KL over candidates, the likeliest ones."""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm import kl
from learner.model.ema import Ema
from learner.packing import MicroBatch

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.model.engine import Engine


class Anchored(NamedTuple):
    """A micro-batch's N action tokens under the anchor; None where there is none, or no top-k."""

    logprobs: Tensor | None = None  # float32[N]
    ids: Tensor | None = None  # int32[N, k]: its likeliest tokens
    topk: kl.TopK | None = None


def anchored(
    engine: "Engine",
    anchor: Ema | None,
    micro_batches: list[MicroBatch],
    temperature: float,
    config: LearnerConfig,
) -> list[Anchored]:
    """Each micro-batch's tokens under the anchor, with its `kl_top_k` likeliest ones."""
    if anchor is None:
        return [Anchored()] * len(micro_batches)
    with anchor.swapped_in(engine):
        return [_scored(engine, micro, temperature, config) for micro in micro_batches]


def _scored(
    engine: "Engine", micro: MicroBatch, temperature: float, config: LearnerConfig
) -> Anchored:
    if not config.kl_top_k:
        return Anchored(engine.score(micro, temperature).logprobs)
    scores = engine.score(micro, temperature, config.kl_top_k)
    assert scores.candidates is not None
    ids, logprobs = scores.candidates
    topk = kl.TopK(
        logprobs=logprobs,
        outside=(ids != micro.tokens[micro.loss_mask].unsqueeze(-1)).all(-1),
        direction=config.kl_direction or "reverse",
        gradient=config.kl_gradient or "unbiased",
        keeps_tail=config.kl_tail is not False,
    )
    return Anchored(scores.logprobs, ids, topk)

"""The clipped loss: a naive transcription, the direction of the clip, and masks with holes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.objectives.grpo import grpo_loss, token_mean

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def naive(lp: float, lo: float, advantage: float, weight: float) -> float:
    ratio = math.exp(lp - lo)
    clipped = min(max(ratio, 0.8), 1.28)
    return weight * -min(ratio * advantage, clipped * advantage)


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(4, 9, generator=generator, dtype=torch.float64)  # noqa: E731
    current = -draw().abs()
    return {
        "current_logprobs": current.clone().requires_grad_(),
        "proximal_logprobs": current + 0.3 * draw(),
        "advantages": draw(),
        "weights": draw().abs(),
        "mask": draw() > 0,
    }


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_equals_the_formula_token_by_token(seed: int) -> None:
    given_ = tensors(seed)
    losses, _ = grpo_loss(**given_, **CLIP)
    columns = [t.flatten().tolist() for t in given_.values()]
    expected = [naive(*row[:4]) if row[4] else 0.0 for row in zip(*columns, strict=True)]
    assert losses.flatten().tolist() == pytest.approx(expected)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_no_gradient_off_the_mask_even_beside_garbage(seed: int) -> None:
    given_ = tensors(seed)
    off = ~given_["mask"]
    for name in ("proximal_logprobs", "weights", "advantages"):
        given_[name] = given_[name].masked_fill(off, math.nan)
    grpo_loss(**given_, **CLIP).losses.sum().backward()
    gradient = given_["current_logprobs"].grad
    assert gradient.isfinite().all()
    assert (gradient[off] == 0).all()


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [
        (1.0, 1.27, True),
        (1.0, 1.29, False),  # already likelier: no further up
        (1.0, 0.5, True),  # a good action that became unlikely may always come back
        (-1.0, 0.81, True),
        (-1.0, 0.79, False),  # already suppressed: no further down
        (-1.0, 3.0, True),
    ],
)
def test_the_clip_stops_only_what_has_gone_far_enough(
    advantage: float, ratio: float, moves: bool
) -> None:
    current = torch.tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1)
    result = grpo_loss(current, 0 * one, advantage * one, one, one.bool(), **CLIP)
    result.losses.sum().backward()
    assert bool(current.grad) is moves
    assert bool(result.clipped) is not moves
    if moves:
        assert float(current.grad) == pytest.approx(-advantage * ratio)


def test_the_weight_scales_the_gradient_once() -> None:
    current = torch.zeros(1, 2, requires_grad=True)
    one = torch.ones(1, 2)
    weights = torch.tensor([[1.0, 1.7]], requires_grad=True)
    grpo_loss(current, 0 * one, one, weights, one.bool(), **CLIP).losses.sum().backward()
    assert current.grad.tolist() == [[-1.0, pytest.approx(-1.7)]]
    assert weights.grad is None


def test_one_denominator() -> None:
    losses = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    shares = token_mean(losses[:1], 6) + token_mean(losses[1:], 6)
    assert float(shares) == pytest.approx(1.0)

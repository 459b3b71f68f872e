"""The clipped loss: the direction of the clip, and the dual clip."""

import math

import pytest
import torch

from learner.algorithm.objectives import OBJECTIVES, Bounds, PolicyLoss, Terms, grpo

BOUNDS = OBJECTIVES["grpo"][1]


def at(ratio: float, advantage: float, bounds: Bounds) -> tuple[PolicyLoss, float]:
    current = torch.tensor([math.log(ratio)], requires_grad=True)
    zero = torch.zeros(1)
    result = grpo(current, Terms(zero, zero, torch.tensor([advantage]), zero), bounds)
    result.losses.sum().backward()
    return result, float(current.grad)


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
    result, slope = at(ratio, advantage, BOUNDS)
    assert bool(slope) is moves
    assert bool(result.clipped) is not moves
    if moves:
        assert slope == pytest.approx(-advantage * ratio)


@pytest.mark.parametrize(("ratio", "moves"), [(2.9, True), (3.1, False)])
def test_the_dual_clip_bounds_a_negative_advantage_from_above(ratio: float, moves: bool) -> None:
    result, slope = at(ratio, -2.0, Bounds(0.2, 0.28, cap=3.0))
    assert float(result.losses.detach()) == pytest.approx(2.0 * min(ratio, 3.0))
    assert bool(slope) is moves and bool(result.clipped) is not moves


def test_the_dual_clip_leaves_a_positive_advantage_alone() -> None:
    result, slope = at(1.1, 2.0, Bounds(0.2, 0.28, cap=1.05))
    assert slope == pytest.approx(-2.2) and not result.clipped

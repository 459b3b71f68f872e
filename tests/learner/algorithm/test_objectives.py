"""Every objective's value, slope and clipping, token by token, against its formula."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import LearnerConfig
from learner.algorithm.objectives import (
    OBJECTIVES,
    ClipBounds,
    PolicyLoss,
    Terms,
    choose,
    moment_bounds,
)

Naive = tuple[float, float, bool]  # value, slope, clipped


def surrogate(ratio: float, credit: float, low: float, high: float) -> Naive:
    bounded = min(max(ratio, 1 - low), 1 + high)
    clipped = bounded * credit < ratio * credit
    return -min(ratio * credit, bounded * credit), 0.0 if clipped else -credit * ratio, clipped


def grpo(lp: float, lo: float, lm: float, credit: float, log_s: float) -> Naive:
    return surrogate(math.exp(lp - lo), credit, 0.2, 0.28)


def gspo(lp: float, lo: float, lm: float, credit: float, log_s: float) -> Naive:
    return surrogate(math.exp(log_s), credit, 3e-4, 4e-4)


def cispo(lp: float, lo: float, lm: float, credit: float, log_s: float) -> Naive:
    ratio = math.exp(lp - lo)
    return -min(ratio, 5.0) * credit * lp, -min(ratio, 5.0) * credit, ratio > 5.0


def dppo_tv(lp: float, lo: float, lm: float, credit: float, log_s: float) -> Naive:
    moved = math.exp(lp) - math.exp(lm)
    dropped = moved > 0.2 if credit > 0 else moved < -0.2
    slope = 0.0 if dropped else -min(math.exp(lp - lo), 5.0) * credit
    return slope * lp, slope, dropped


def reinforce(lp: float, lo: float, lm: float, credit: float, log_s: float) -> Naive:
    return -credit * lp, -credit, False


FORMULAS: dict[str, Callable[..., Naive]] = {
    f.__name__: f for f in (grpo, gspo, cispo, dppo_tv, reinforce)
}


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_equals_the_formula(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(20, generator=generator, dtype=torch.float64)  # noqa: E731
    current = -draw().abs()
    terms = Terms(current + draw(), -draw().abs(), draw(), 5e-4 * draw())
    current.requires_grad_()
    objective, bounds, _ = choose(LearnerConfig(objective=name))
    result = objective(current, terms, bounds)
    result.losses.sum().backward()
    rows = zip(current.tolist(), *(values.tolist() for values in terms), strict=True)
    values, slopes, clipped = zip(*(FORMULAS[name](*row) for row in rows), strict=True)
    assert result.losses.tolist() == pytest.approx(values)
    assert current.grad.tolist() == pytest.approx(slopes)
    assert result.clipped.tolist() == list(clipped)


@pytest.mark.parametrize("name", FORMULAS)
def test_may_be_evaluated_slice_by_slice(name: str) -> None:
    objective, bounds, _ = OBJECTIVES[name]
    current = -torch.rand(9)
    terms = Terms(-torch.rand(9), -torch.rand(9), torch.randn(9), torch.zeros(9))
    whole = objective(current, terms, bounds).losses
    parts = [objective(current[p], terms.part(p), bounds).losses for p in (slice(4), slice(4, 9))]
    assert torch.equal(torch.cat(parts), whole)


def test_all_are_registered_with_bounds_that_configuration_overrides() -> None:
    assert set(OBJECTIVES) == set(FORMULAS)
    given = LearnerConfig(objective="dppo_tv", clip_low=0.1, ratio_cap=7.0)
    assert choose(given)[1] == (0.1, 0.2, 7.0)
    assert choose(LearnerConfig(objective="gspo"))[1] == (3e-4, 4e-4, None)
    assert choose(LearnerConfig(objective="cispo"))[1] == (1.0, 4.0, None)


def test_gspo_is_summed_as_in_its_paper_unless_told_otherwise() -> None:
    reductions = {name: choose(LearnerConfig(objective=name)).reduction for name in OBJECTIVES}
    assert reductions.pop("gspo") == "sequence_mean" and {*reductions.values()} == {"token_mean"}
    given = LearnerConfig(objective="gspo", reduction="token_mean")
    assert choose(given).reduction == "token_mean"


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learner.objective = 'ppo': one of 'grpo', 'cispo'"):
        choose(LearnerConfig(objective="ppo"))


GRPO, BOUNDS, _ = OBJECTIVES["grpo"]


def at(ratio: float, advantage: float, bounds: ClipBounds) -> tuple[PolicyLoss, float]:
    current = torch.tensor([math.log(ratio)], requires_grad=True)
    zero = torch.zeros(1)
    result = GRPO(current, Terms(zero, zero, torch.tensor([advantage]), zero), bounds)
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
    result, slope = at(ratio, -2.0, ClipBounds(0.2, 0.28, cap=3.0))
    assert float(result.losses.detach()) == pytest.approx(2.0 * min(ratio, 3.0))
    assert bool(slope) is moves and bool(result.clipped) is not moves


def test_the_dual_clip_leaves_a_positive_advantage_alone() -> None:
    result, slope = at(1.1, 2.0, ClipBounds(0.2, 0.28, cap=1.05))
    assert slope == pytest.approx(-2.2) and not result.clipped


@given(
    st.lists(
        st.tuples(st.integers(-99, 99).map(lambda n: n / 100), st.sampled_from([-1.0, 0.0, 2.0])),
        max_size=12,
    ),
    st.sampled_from([0.00123, 0.0411, 0.30007]),  # no mean of squares: none lies on the edge
)
def test_the_second_moment_bounds_what_the_clip_can_act_on(
    tokens: list[tuple[float, float]], budget: float
) -> None:
    logs, advantages = (torch.tensor(c).double() for c in (list(zip(*tokens)) or ((), ())))  # noqa: B905
    bounds = moment_bounds(logs, advantages, budget)
    harmful = [abs(x) for x, a in tokens if (a > 0 and x > 0) or (a < 0 and x < 0)]
    moment = lambda tau: sum(min(x, tau) ** 2 for x in harmful) / len(harmful)  # noqa: E731
    if not harmful or moment(2.0) <= budget:
        assert bounds == (1.0, math.inf, None)
        return
    within = [x for x in harmful if moment(x) <= budget]
    tau = max(within, default=budget**0.5)
    assert bounds.low == pytest.approx(1 - math.exp(-tau), rel=1e-6, abs=1e-9)
    assert bounds.high == pytest.approx(math.exp(tau) - 1, rel=1e-6, abs=1e-9)

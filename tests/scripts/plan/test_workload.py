"""The rollouts that a simulation draws."""

import itertools
import random
from statistics import fmean, quantiles

import pytest
from pytest import approx

from configs.load import ConfigError
from scripts.plan.workload import Latency, Means, Shape, Turn, Workload


def test_a_latency_has_its_median_p99_and_mean() -> None:
    latency = Latency(0.2, 2.0)
    drawn = list(itertools.islice(latency.draws(random.Random(0)), 40_000))
    cuts = quantiles(drawn, n=100)
    assert cuts[49] == approx(0.2, rel=0.05) and cuts[98] == approx(2.0, rel=0.1)
    assert fmean(drawn) == approx(latency.mean_s, rel=0.05)


def test_equal_numbers_are_a_constant() -> None:
    assert set(itertools.islice(Latency(0.3, 0.3).draws(random.Random(0)), 9)) == {0.3}


@pytest.mark.parametrize("given", [(2.0, 0.2), (0.0, 1.0), (-1.0, 1.0)])
def test_numbers_that_are_no_latency_are_refused(given: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="0 < median"):
        Latency(*given)


def test_shapes_have_the_means_they_were_asked_for() -> None:
    work = Workload(Means(300, 1.5, 8, 50, 10_000, 400, 100_000).shapes(0))
    assert work.searches == approx(1.5, rel=0.05)
    assert work.sampled_tokens == approx(2.5 * 50, rel=0.06)
    assert work.tokens == approx(300 + 2.5 * 50 + 1.5 * 400, rel=0.06)


def test_siblings_are_those_of_one_question() -> None:
    shapes = tuple(Shape(n, (Turn(1),)) for n in range(12))
    work, chance = Workload(shapes, siblings=3), random.Random(0)
    groups = {frozenset(shape.prompt for shape in work.group(3, chance)) for _ in range(99)}
    assert groups == {frozenset(range(n, n + 3)) for n in (0, 3, 6, 9)}
    assert sorted(shape.prompt for shape in work.group(6, chance))[::2] in (
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    )


def test_rollouts_of_no_question_are_drawn_of_all() -> None:
    work, chance = Workload(tuple(Shape(n, (Turn(1),)) for n in range(5))), random.Random(0)
    drawn = [shape.prompt for _ in range(2000) for shape in work.group(2, chance)]
    assert fmean(drawn) == approx(2.0, abs=0.1) and set(drawn) == set(range(5))


def test_a_context_ends_at_its_limit() -> None:
    shapes = Means(100, 3.0, 8, 60, 100, 200, 500).shapes(0)
    assert max(shape.tokens for shape in shapes) <= 500
    assert all(turn.action <= 100 for shape in shapes for turn in shape.turns)
    assert not any(shape.turns[-1].searches for shape in shapes)


def test_a_turn_may_begin_another_sequence() -> None:
    """Its context is its own prompt, of which the cache knows what an earlier sequence began with;
    the learner reads both.
    """
    shape = Shape(100, (Turn(10, 50, True), Turn(30, prompt=64, known=32), Turn(20)))
    assert shape.tokens == 100 + 10 + 50 + 64 + 30 + 20 and shape.sampled == 60
    work = Workload((shape,))
    assert work.held_tokens == approx((10 * 105 + 30 * (64 + 15) + 20 * (94 + 10)) / 60)
    assert work.taken_in(16) == 100 + (64 - 32) + (94 - 80)


def test_what_is_held_is_the_mean_context_of_the_sampled_tokens() -> None:
    work = Workload((Shape(100, (Turn(10, 50, True), Turn(30))),))
    assert work.held_tokens == approx((10 * 105 + 30 * (160 + 15)) / 40)

"""Behaviour ratios and weights at every level and rule, and effective sample size."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithm.importance import (
    behaviour_ratio,
    behaviour_weights,
    effective_sample_size,
    log_ratio,
    sequence_means,
)

ALL = torch.ones(3, dtype=torch.bool)
ROW = torch.zeros(3, dtype=torch.int64)
logprobs = st.lists(st.floats(-40, 0), min_size=3, max_size=3)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(logprobs, logprobs, st.floats(0.5, 5))
def test_a_weight_is_proximal_over_behaviour_truncated(
    proximal: list[float], behaviour: list[float], cap: float
) -> None:
    pairs = zip(proximal, behaviour, strict=True)
    expected = [min(math.exp(max(-20.0, min(20.0, p - b))), cap) for p, b in pairs]
    ratios = behaviour_ratio(log_ratio(double(proximal), double(behaviour), ALL), ROW, ALL, "token")
    weights = behaviour_weights(ratios, ALL, rule="truncate", floor=0.0, cap=cap)
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2), st.booleans()), max_size=12))
def test_a_sequence_has_the_product_or_the_geometric_mean(
    tokens: list[tuple[int, float, bool]],
) -> None:
    tokens.sort(key=lambda token: token[0])
    rows = torch.tensor([row for row, _, _ in tokens], dtype=torch.int64)
    usable = torch.tensor([known for _, _, known in tokens], dtype=torch.bool)
    values = torch.where(usable, double([value for _, value, _ in tokens]), 0.0)
    for level, combine in (("sequence", sum), ("geometric", statistics.fmean)):
        known = {r: [v for row, v, k in tokens if row == r and k] or [0.0] for r in range(4)}
        expected = [math.exp(combine(known[row])) for row, _, _ in tokens]
        assert behaviour_ratio(values, rows, usable, level).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_logprob_that_is_no_number_spoils_nobody_else(level: str, value: float) -> None:
    rows, behaviour = torch.tensor([0, 0, 1]), torch.tensor([-1.0, value, -2.0])
    usable = behaviour.isfinite()
    proximal = torch.full((3,), -0.5, requires_grad=True)
    ratios = behaviour_ratio(log_ratio(proximal, behaviour, usable), rows, usable, level)
    weights = behaviour_weights(ratios, usable, rule="truncate", floor=0.0, cap=9.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 0.0, math.exp(1.5)])
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("truncate", [0.5, 1.0, 2.0]), ("mask", [0.0, 1.0, 0.0]), ("none", [1.0, 1.0, 1.0])],
)
def test_rules(rule: str, expected: list[float]) -> None:
    ratios = torch.tensor([0.4, 1.0, 3.0])
    weights = behaviour_weights(ratios, ALL, rule=rule, floor=0.5, cap=2.0)
    assert weights.tolist() == expected
    unusable = behaviour_weights(ratios, ~ALL, rule=rule, floor=0.5, cap=2.0)
    assert unusable.tolist() == [0.0] * 3


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learner.behaviour_level = 'word'"):
        behaviour_ratio(torch.zeros(3), ROW, ALL, "word")
    with pytest.raises(ValueError, match=r"learner.behaviour_weight = 'clip'"):
        behaviour_weights(torch.ones(3), ALL, rule="clip", floor=0.0, cap=2.0)


def test_a_sequence_without_usable_tokens_has_mean_zero() -> None:
    assert sequence_means(torch.zeros(3), ROW, ~ALL).tolist() == [0.0]
    assert sequence_means(torch.zeros(0), ROW[:0], ALL[:0]).tolist() == []


def test_effective_sample_size() -> None:
    assert float(effective_sample_size(torch.full((3,), 0.3))) == pytest.approx(1.0)
    weights = torch.tensor([1.0, 2.0, 3.0])
    assert float(effective_sample_size(weights)) == pytest.approx(36 / (3 * 14))
    assert float(effective_sample_size(7 * weights)) == pytest.approx(36 / (3 * 14))

"""Group advantages against the formula written naively, and against other systems' numbers."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantage import group_advantages

rewards = st.lists(
    st.one_of(st.just(math.nan), st.floats(-2, 2, allow_subnormal=False)), min_size=1, max_size=9
)


def naive(values: list[float], std: str) -> list[float]:
    scored = [v for v in values if not math.isnan(v)]
    if len(set(scored)) < 2:
        return [0.0] * len(values)
    mean = sum(scored) / len(scored)
    scale = statistics.stdev(scored) + 1e-6 if std == "group" else 1.0
    return [0.0 if math.isnan(v) else (v - mean) / scale for v in values]


@settings(deadline=None)
@given(rewards, st.sampled_from(["none", "group"]))
def test_equals_the_formula(values: list[float], std: str) -> None:
    result = group_advantages(torch.tensor(values, dtype=torch.float64), std)
    assert result.tolist() == pytest.approx(naive(values, std), rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(rewards)
def test_a_group_is_centred(values: list[float]) -> None:
    advantages = group_advantages(torch.tensor(values, dtype=torch.float64), "none")
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("std", ["none", "group"])
@pytest.mark.parametrize("values", [[1.0], [0.1] * 3, [0.0, math.nan], [math.nan] * 2])
def test_no_signal_is_exactly_zero(values: list[float], std: str) -> None:
    assert group_advantages(torch.tensor(values), std).tolist() == [0.0] * len(values)


def test_an_unscorable_sibling_changes_nothing_for_the_others() -> None:
    without = group_advantages(torch.tensor([1.0, 0.0, 0.0]), "group")
    with_one = group_advantages(torch.tensor([1.0, 0.0, math.nan, 0.0]), "group")
    assert with_one.tolist() == [*without.tolist()[:2], 0.0, without.tolist()[2]]


def test_other_estimators_are_refused() -> None:
    with pytest.raises(ValueError, match="'batch'"):
        group_advantages(torch.tensor([1.0]), "batch")
    with pytest.raises(ValueError, match=r"shape \[1, 1\]"):
        group_advantages(torch.ones(1, 1), "none")

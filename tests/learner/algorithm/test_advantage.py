"""Group advantages against the formula written naively."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithm.advantage import advantages

rewards = st.lists(
    st.one_of(st.just(math.nan), st.floats(-2, 2, allow_subnormal=False)), min_size=1, max_size=9
)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one(values: list[float], baseline: str = "mean", std: str = "none") -> list[float]:
    return advantages([double(values)], baseline, std)[0].tolist()


def centred(values: list[float], baseline: str) -> list[float]:
    scored = [v for v in values if not math.isnan(v)]
    if len(set(scored)) < 2:
        return [0.0] * len(values)
    total, others = sum(scored), len(scored) - 1
    if baseline == "leave_one_out":
        return [0.0 if math.isnan(v) else v - (total - v) / others for v in values]
    return [0.0 if math.isnan(v) else v - total / len(scored) for v in values]


def spread(values: list[float]) -> float:
    scored = [v for v in values if not math.isnan(v)]
    return statistics.stdev(scored) if len(scored) > 1 else 1.0


@settings(deadline=None)
@given(rewards, st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["none", "group"]))
def test_equals_the_formula(values: list[float], baseline: str, std: str) -> None:
    scale = spread(values) + 1e-6 if std == "group" else 1.0
    expected = [c / scale for c in centred(values, baseline)]
    assert one(values, baseline, std) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(st.lists(rewards, min_size=1, max_size=4), st.sampled_from(["mean", "leave_one_out"]))
def test_over_the_batch_all_share_one_spread(groups: list[list[float]], baseline: str) -> None:
    flat = [c for g in groups for v, c in zip(g, centred(g, "mean"), strict=True) if v == v]
    scale = spread(flat) + 1e-6
    found = advantages([double(group) for group in groups], baseline, "batch")
    for group, ours in zip(groups, found, strict=True):
        expected = [c / scale for c in centred(group, baseline)]
        assert ours.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@settings(deadline=None)
@given(rewards)
def test_a_group_is_centred(values: list[float]) -> None:
    assert sum(one(values)) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("values", [[1.0], [0.1] * 3, [0.0, math.nan], [math.nan] * 2])
def test_no_signal_is_exactly_zero(values: list[float], std: str, baseline: str) -> None:
    assert one(values, baseline, std) == [0.0] * len(values)


def test_an_unscorable_sibling_changes_nothing_for_the_others() -> None:
    without = one([1.0, 0.0, 0.0], "leave_one_out", "group")
    with_one = one([1.0, 0.0, math.nan, 0.0], "leave_one_out", "group")
    assert with_one == [*without[:2], 0.0, without[2]]


def test_other_estimators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learner.advantage_std = 'token'"):
        advantages([torch.ones(1)], "mean", "token")
    with pytest.raises(ValueError, match=r"learner.baseline = 'value'"):
        advantages([torch.ones(1)], "value", "none")
    with pytest.raises(ValueError, match=r"shape \[1, 1\]"):
        advantages([torch.ones(1, 1)], "mean", "none")

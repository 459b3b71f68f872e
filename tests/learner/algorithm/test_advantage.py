"""Group advantages against the formula written naively."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithm.advantage import advantages, optimal

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


@given(rewards, st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["none", "group"]))
def test_equals_the_formula(values: list[float], baseline: str, std: str) -> None:
    scale = spread(values) + 1e-6 if std == "group" else 1.0
    expected = [c / scale for c in centred(values, baseline)]
    assert one(values, baseline, std) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.lists(rewards, min_size=1, max_size=4), st.sampled_from(["mean", "leave_one_out"]))
def test_over_the_batch_all_share_one_spread(groups: list[list[float]], baseline: str) -> None:
    flat = [c for g in groups for v, c in zip(g, centred(g, "mean"), strict=True) if v == v]
    scale = spread(flat) + 1e-6
    found = advantages([double(group) for group in groups], baseline, "batch")
    for group, ours in zip(groups, found, strict=True):
        expected = [c / scale for c in centred(group, baseline)]
        assert ours.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


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


@given(st.lists(rewards, min_size=1, max_size=4), st.sampled_from(["mean", "none"]), st.data())
def test_whitened_over_the_tokens_of_all_rollouts(
    groups: list[list[float]], baseline: str, data: st.DataObject
) -> None:
    counts = [[data.draw(st.integers(0, 5)) for _ in group] for group in groups]
    found = advantages(
        [double(group) for group in groups], baseline, "whiten",
        tokens=[torch.tensor(each) for each in counts],
    )  # fmt: skip
    bases = [centred(group, "mean") if baseline == "mean" else group for group in groups]
    tokens = [
        value for base, each, group in zip(bases, counts, groups, strict=True)
        for value, count, reward in zip(base, each, group, strict=True)
        for _ in range(count) if not math.isnan(reward)
    ]  # fmt: skip
    mean = sum(tokens) / max(len(tokens), 1)
    variance = sum((t - mean) ** 2 for t in tokens) / max(len(tokens) - 1, 1)
    for ours, base, each, group in zip(found, bases, counts, groups, strict=True):
        expected = [
            0.0 if math.isnan(reward) or not count else (value - mean) / math.sqrt(variance + 1e-8)
            for value, count, reward in zip(base, each, group, strict=True)
        ]
        assert ours.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


rollouts = st.lists(
    st.tuples(
        st.one_of(st.just(math.nan), st.floats(-2, 2, allow_subnormal=False)),
        st.integers(1, 9),
        st.floats(-3, 3),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(rollouts)
def test_the_optimal_baseline_is_the_formula_s(group: list[tuple[float, int, float]]) -> None:
    values, counts, logs = (list(column) for column in zip(*group, strict=True))
    [found] = advantages(
        [double(values)], "optimal", "none",
        tokens=[torch.tensor(counts)], log_ratios=[double(logs)],
    )  # fmt: skip
    known = [(r, n * math.exp(2 * x)) for r, n, x in group if not math.isnan(r)]
    base = sum(r * w for r, w in known) / sum(w for _, w in known) if known else 0.0
    flat = len({r for r, _ in known}) < 2
    expected = [0.0 if math.isnan(r) or flat else r - base for r in values]
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_optimal_baseline_has_the_least_variance() -> None:
    """Of Σ w_i g_i (R_i − b), with orthogonal gradients g_i of squared length n_i."""
    rewards, counts, logs = double([1.0, 0.0, 0.3]), torch.tensor([5, 2, 9]), double([0.4, -1, 0.1])

    def variance(baseline: Tensor) -> float:
        return float((logs.exp().square() * counts * (rewards - baseline).square()).sum())

    best = optimal(rewards, counts, logs)
    assert all(variance(best) < variance(best + shift) for shift in (-0.01, 0.01))


def test_on_policy_the_optimal_baseline_weighs_by_length() -> None:
    [found] = advantages([double([1.0, 0.0])], "optimal", "none", tokens=[torch.tensor([1, 3])])
    assert found.tolist() == pytest.approx([0.75, -0.25])


def test_without_a_baseline_a_reward_is_the_advantage() -> None:
    assert one([1.0, math.nan, 1.0], "none") == [1.0, 0.0, 1.0]


def test_other_estimators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learner.advantage_std = 'token'"):
        advantages([torch.ones(1)], "mean", "token")
    with pytest.raises(ValueError, match=r"learner.baseline = 'value'"):
        advantages([torch.ones(1)], "value", "none")
    with pytest.raises(ValueError, match=r"shape \[1, 1\]"):
        advantages([torch.ones(1, 1)], "mean", "none")

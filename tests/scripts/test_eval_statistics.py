"""Pass@k and the bootstrap, against naive transcriptions of what they estimate."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from scripts.eval_statistics import (
    RESAMPLES,
    interval,
    pass_at_k,
    percentile,
    pooled,
    resampled_means,
)

VALUES = [1.0] * 13 + [0.0] * 20 + [0.5] * 7


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(correct: int, k: int) -> None:
    samples = [True] * correct + [False] * (5 - correct)
    naive = fmean(any(subset) for subset in combinations(samples, k))
    assert pass_at_k(correct, 5, k) == pytest.approx(naive, abs=1e-12)


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_of_other_than_the_samples_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k = {k}"):
        pass_at_k(2, 5, k)


def test_resampled_means_are_distributed_as_naive_ones() -> None:
    random = np.random.default_rng(5)
    naive = [random.choice(VALUES, len(VALUES)).mean() for _ in range(RESAMPLES)]
    ours = resampled_means(VALUES, "nq em")
    assert len(ours) == RESAMPLES and ours.mean() == pytest.approx(fmean(VALUES), abs=3e-3)
    assert ours.std() == pytest.approx(np.std(naive), rel=0.03)
    assert interval(ours) == pytest.approx(tuple(np.quantile(naive, (0.025, 0.975))), abs=0.02)


def test_an_interval_is_the_same_every_time_and_its_own() -> None:
    again = [resampled_means(list(reversed(VALUES)), "nq em"), resampled_means(VALUES, "nq em")]
    assert np.array_equal(*again)
    assert not np.array_equal(again[0], resampled_means(VALUES, "hotpot em"))


def test_what_does_not_vary_has_an_interval_without_width() -> None:
    assert interval(resampled_means([1.0] * 9, "all right")) == (1.0, 1.0)


def test_sets_are_resampled_apart_and_then_weighed() -> None:
    nq, hotpot = resampled_means(VALUES, "nq"), resampled_means([1.0, 0.0], "hotpot")
    assert pooled([nq, hotpot], [3.0, 1.0]) == pytest.approx((3 * nq + hotpot) / 4)
    width = pooled([nq, resampled_means(VALUES, "popqa")], [1.0, 1.0]).std()
    assert width == pytest.approx(nq.std() / np.sqrt(2), rel=0.05)


def test_percentiles() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([], 0.99) == 0.0

"""Resampled means and their intervals, against naive resampling."""

import time
import tracemalloc
from statistics import fmean

import numpy as np
import pytest

from scripts.evaluation.bootstrap import RESAMPLES, interval, pooled, resampled_means

VALUES = [1.0] * 13 + [0.0] * 20 + [0.5] * 7


@pytest.mark.parametrize("distinct", [2, 6000])
def test_resampling_many_distinct_values_takes_little_time_and_memory(distinct: int) -> None:
    values = np.resize(np.arange(distinct) / distinct, 6000).tolist()
    tracemalloc.start()
    begun = time.process_time()
    means = resampled_means(values, "key")
    seconds, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 4.0 and peak < 64 << 20
    assert len(means) == RESAMPLES and means.mean() == pytest.approx(np.mean(values), abs=1e-3)
    assert means.std() == pytest.approx(np.std(values) / 6000**0.5, rel=0.05)


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

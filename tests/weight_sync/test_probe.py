"""The probe's arithmetic: how far an engine may be from the learner."""

import math

import numpy as np
import pytest

from weight_sync.probe import Bound, Distance, bound, distance


def test_mean_quantile_and_largest_are_those_of_the_differences() -> None:
    learner = [-float(k) for k in range(1, 12)]
    engine = np.asarray([value + 0.1 * k for k, value in enumerate(learner)], np.float32)
    found = distance(engine, learner)
    assert found.mean == pytest.approx(0.5, abs=1e-5)
    assert found.quantile == pytest.approx(0.9, abs=1e-5)
    assert found.largest == pytest.approx(1.0, abs=1e-5)


def test_the_largest_alone_condemns_nobody() -> None:
    assert Bound(0.1, 0.4).admits(Distance(0.05, 0.2, 3.0))
    assert not Bound(0.1, 0.4).admits(Distance(0.2, 0.2, 0.2))
    assert not Bound(0.1, 0.4).admits(Distance(0.05, 0.5, 0.5))
    assert not Bound(0.1, 0.4).admits(Distance(math.nan, math.nan, math.nan))


def test_the_bound_follows_the_start_and_never_falls_below_the_tolerance() -> None:
    assert bound(0.01) == Bound(0.01, 0.04)
    assert bound(0.01, Distance(0.001, 0.002, 1.0), [-1.0], [-1.0]) == Bound(0.01, 0.04)
    wide = bound(0.01, Distance(0.03, 0.08, 1.0), [-2.0], [-2.0])
    assert wide == pytest.approx(Bound(0.15, 0.4))


def test_the_bound_grows_with_the_log_probs_and_does_not_shrink() -> None:
    start = Distance(0.03, 0.08, 1.0)
    assert bound(0.01, start, [-2.0, -4.0], [-3.0, -6.0]) == pytest.approx(Bound(0.225, 0.6))
    assert bound(0.01, start, [-2.0], [-1.0]) == pytest.approx(Bound(0.15, 0.4))


def test_another_number_of_log_probs_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 log-probs of the engine, 3 expected"):
        distance(np.zeros(2, np.float32), [0.0] * 3)

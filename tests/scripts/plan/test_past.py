"""A workload taken from a run that was."""

from collections.abc import Callable
from typing import Any

import pytest
from pytest import approx

from configs.load import ConfigError
from scripts.plan.past import latency_of, workload_of_run
from scripts.plan.workload import Latency, Shape, Turn

ALL_ALIKE = Shape(5, (Turn(4, 2), Turn(4, 0)))


def test_rollouts_are_those_of_the_log(make_recorded_run: Callable[..., Any]) -> None:
    run = make_recorded_run()
    run.train(0)
    run.train(1)
    found = workload_of_run(run.path, 0.25)
    assert found.shapes == (ALL_ALIKE,) * 8 and found.no_signal == 0.25
    assert found.latency == Latency(0.0, 0.0)  # it made no searches


def test_a_run_without_rollouts_is_refused(make_recorded_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="holds no rollouts"):
        workload_of_run(make_recorded_run().path, 0.0)


def test_latencies_are_told_by_median_and_p99() -> None:
    found = latency_of([n / 100 for n in range(1, 102)])
    assert (found.p50_s, found.p99_s) == (approx(0.51), approx(1.0))
    assert latency_of([0.3]) == Latency(0.0, 0.0)

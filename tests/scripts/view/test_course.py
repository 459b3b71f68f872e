"""The course of a run: what its batches were like, and the forecast beside them."""

from collections.abc import Callable

import pytest

from configs.load import save
from configs.schema import Config, ReplayConfig
from replay.log.records import (
    Delivered,
    EvaluationFinished,
    EvaluationOpened,
    LearnerResumed,
    Reported,
    RunResumed,
    Sampled,
)
from replay.log.summary import Summary
from replay.protocol import EvalResult, Ready
from scripts.runs.forecast import forecast
from scripts.view.answers import curves, overview
from scripts.view.course import BEFORE, INSIDE, TOKENS, TURNS, Course
from scripts.view.index import Index
from tests.scripts.conftest import RecordedRun

BUSY = {"learner/update_s": 6.0, "learner/wait_for_batch_s": 2.0}


def delivered(at: float, group: int, oldest: int, tokens: int = 10) -> Delivered:
    summary = Summary(group, 0, "q", "train", 1.0, 0, 0, 2, tokens, oldest, oldest)

    return Delivered(at, "actor", group, 0, b"", summary)


def batch(at: float, step: int, *groups: int) -> Sampled:
    return Sampled(at, 1, step, groups, (), {})


def test_a_batch_tells_its_steps_before_the_queue_and_in_it() -> None:
    course = Course()
    course.take(LearnerResumed(1.0, 1, 0))
    course.deliver(delivered(2.0, 1, 0), 1.0)
    course.report(Reported(3.0, 1, 1, {}), True)
    course.deliver(delivered(4.0, 2, 0, 30), 1.0)  # begun before the step, done after it
    course.report(Reported(5.0, 1, 2, {}), True)
    course.report(Reported(6.0, 1, 3, {}), True)
    found = course.sample(batch(7.0, 4, 1, 2))
    assert found == {BEFORE: 0.5, INSIDE: 2.5, TOKENS: 20.0, TURNS: 2.0}
    assert course.sample(batch(8.0, 5, 1)) == {}  # it is gone
    course.deliver(delivered(9.0, 3, 1), 8.0)
    course.take(LearnerResumed(10.0, 2, 2))  # from an older checkpoint
    assert course.sample(batch(11.0, 3, 3)) == {BEFORE: 1.0, INSIDE: 0.0, TOKENS: 10.0, TURNS: 2.0}


def test_what_the_learner_does_is_known() -> None:
    course = Course()
    assert course.completed == -1
    course.take(LearnerResumed(1.0, 1, 7))
    course.take(EvaluationOpened(2.0, 7))
    course.sample(batch(3.0, 8))
    assert (course.completed, course.batch, course.since) == (7, 8, 3.0)
    course.report(Reported(5.0, 1, 8, {}), False)
    assert (course.completed, course.since, course.published) == (8, 5.0, (7, 1.0))
    assert course.evaluating == {7: 2.0}
    course.take(EvaluationFinished(6.0, EvalResult(7, 1, 0.5, None, {}, {}, 1.0, 7, 7)))
    assert course.evaluating == {}


@pytest.mark.parametrize(("waits_s", "ratio"), [(2.0, 0.75), (0.1, 1.0)])
def test_the_forecast_is_the_published_formula_at_what_was_measured(
    waits_s: float, ratio: float
) -> None:
    course = Course()
    assert course.forecast(4, 2) is None
    gauges = BUSY | {"learner/wait_for_batch_s": waits_s}
    course.take(first := Reported(10.0, 1, 1, gauges))
    course.report(first, True)
    for at, lasted in ((12.0, 2.0), (16.0, 6.0)):
        course.deliver(delivered(at, int(at), 1), at - lasted)
    course.take(RunResumed(1000.0, ""))  # nothing went on meanwhile
    course.take(second := Reported(1004.0, 1, 2, gauges))
    course.report(second, False)
    in_flight, tail = 8.0 / (6.0 + 4.0), (4.0 + 36.0) / 2 / 4.0**2
    queue = 2 - in_flight / 4
    wanted = forecast(concurrency=in_flight, batch=4, ratio=ratio, queue=queue, tail=tail)
    assert course.forecast(4, 2) == pytest.approx(wanted)


def test_the_overview_has_both(index_of: Callable[..., Index], recorded_run: RecordedRun) -> None:
    for step in range(3):
        recorded_run.now += 5
        recorded_run.train(step)
        recorded_run.report(step + 1, BUSY)
    index = index_of(recorded_run.path)
    told = curves(index, [BEFORE, INSIDE, TOKENS])
    assert told[BEFORE] == [{"steps": [1, 2, 3], "values": [0.0, 0.0, 0.0]}]
    assert told[TOKENS][0]["values"] == [8.0] * 3
    assert overview(index)["runs"][0]["forecast"] is None  # without a configuration


def test_a_forecast_is_that_of_the_run_s_configuration(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    replay = ReplayConfig(groups_per_step=2, group_size=2, max_staleness=3)
    save(Config(replay=replay), recorded_run.path / "config.yaml")
    for step in range(3):
        recorded_run.send("actor", Ready("actor", 100, 1, step))
        recorded_run.now += 5
        recorded_run.train(step)
        recorded_run.report(step + 1, BUSY)
    index = index_of(recorded_run.path)
    before, inside = overview(index)["runs"][0]["forecast"]
    wanted = index.runs[0].course.forecast(4, 3)
    assert (before, inside) == wanted and before > 0 and inside == 0.75

"""The recorded batches of logs that a real ledger wrote."""

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.schema import Config, LearnerConfig
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.history import Recording, recorded_batches
from replay.log.records import LearnerResumed, RunResumed, RunStarted, Sampled
from replay.protocol import Batch, LogError
from tests.scripts.conftest import RecordedRun, as_text


def test_the_batches_are_those_the_learner_was_given(recorded_run: RecordedRun) -> None:
    given = [recorded_run.train(step) for step in range(3)]
    replayed = list(recorded_batches(recorded_run.path))
    assert [plain(batch) for batch in replayed] == [plain(batch) for batch in given]
    assert [batch.group_ids for batch in replayed] == [(1, 2), (3, 4), (5, 6)]


def plain(batch: Batch) -> tuple[object, ...]:
    """What the learner computes with."""
    return batch.step, batch.group_ids, batch.versions, batch.groups


def test_groups_without_signal_and_evaluations_are_left_out(
    make_recorded_run: Callable[..., RecordedRun],
) -> None:
    run = make_recorded_run(drop_no_signal=True)
    run.evaluate(0)
    run.deliver_all(reward=1.0)
    batch = run.train(0)
    assert batch.group_ids == (3, 4)
    assert [b.group_ids for b in recorded_batches(run.path)] == [batch.group_ids]


def test_a_step_served_again_after_a_resume_comes_once(recorded_run: RecordedRun) -> None:
    first = [recorded_run.train(step) for step in range(3)]
    recorded_run.resume(step=1)
    again = [recorded_run.sample(step) for step in (1, 2)]
    assert [plain(b) for b in again] == [plain(b) for b in first[1:]]
    assert [b.step for b in recorded_batches(recorded_run.path)] == [1, 2, 3]


def test_a_step_put_together_anew_takes_the_later_ones_with_it(recorded_run: RecordedRun) -> None:
    for step in range(3):
        recorded_run.train(step)
    recorded_run.append(Sampled(9.0, 2, 2, (5, 6), (), {}))
    found = [(b.step, b.group_ids) for b in recorded_batches(recorded_run.path)]
    assert found == [(1, (1, 2)), (2, (5, 6))]


def test_the_reports_are_the_last_of_each_step(recorded_run: RecordedRun) -> None:
    recorded_run.train(0)
    for loss in (0.5, 0.25):
        recorded_run.report(1, {"learner/loss": loss})
    assert Recording.of(recorded_run.path).reports == {1: {"learner/loss": 0.25}}


def test_each_step_has_the_configuration_it_was_trained_under(recorded_run: RecordedRun) -> None:
    for step in range(3):
        recorded_run.train(step)
    longer = Config(learner=LearnerConfig(total_steps=9))
    recorded_run.append(RunResumed(9.0, as_text(longer)), LearnerResumed(9.0, 2, 1))
    recording = Recording.of(recorded_run.path)
    assert [recording.config(step).learner.total_steps for step in (1, 2, 3)] == [3, 9, 9]


def test_a_last_record_that_is_cut_short_is_left_out(recorded_run: RecordedRun) -> None:
    for step in range(2):
        recorded_run.train(step)
    path = recorded_run.path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-3])
    assert [b.step for b in recorded_batches(recorded_run.path)] == [1]


def test_a_gap_is_refused(recorded_run: RecordedRun) -> None:
    recorded_run.train(0)
    recorded_run.append(Sampled(9.0, 1, 3, (1, 2), (), {}))
    with pytest.raises(LogError, match=r"the batch of step 2 is not on record, that of step 3 is"):
        recorded_batches(recorded_run.path)


def test_what_holds_no_batches_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"events\.log: cannot be read"):
        recorded_batches(tmp_path)
    with EventLog.create(tmp_path / FILE_NAME) as log:
        log.append([RunStarted(0.0, 0, as_text(Config()))])
    with pytest.raises(LogError, match="no batch was put together"):
        recorded_batches(tmp_path)

"""A compacted run: what goes on as before, and what is refused or left out by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from replay.log.event_log import FILE_NAME, read
from replay.log.history import Recording, recorded_batches
from replay.log.records import Delivered, StepsCommitted
from replay.protocol import LogError
from scripts import cli
from scripts.runs import show, summary
from scripts.runs.books import Audit
from tests.scripts.conftest import Folder, RecordedRun


@pytest.fixture
def trained(make_recorded_run: Callable[..., RecordedRun]) -> RecordedRun:
    """Three steps and an evaluation, two steps of them committed, in small segments; the second
    step's rollouts have several sequences."""
    run = make_recorded_run(segment_bytes=1000)
    run.evaluate(0)
    for step in range(3):
        run.train(step, sequences=1 + step % 2 * 2)
        run.report(step + 1, {"learner/loss": 0.5})
    run.append(StepsCommitted(2.0, 1, 2))
    run.train(3)
    run.log.close()
    return run


def books(run: RecordedRun) -> dict[str, Any]:
    found = Audit()
    found.fold(run.path / FILE_NAME)
    assert found.faults == []
    return {name: value for name, value in found.summary().items() if name != "payloads"}


def summarised(run: RecordedRun) -> dict[str, Any]:
    return summary.build(Config(run_dir=str(run.path)), "completed", "", 1.0, {}, {})


def test_the_command_says_what_it_saves(trained: RecordedRun, capsys: Any) -> None:
    before = sum(file.stat().st_size for file in trained.path.glob("events.log*"))
    assert cli.main(["compact", str(trained.path)]) == 0
    out = capsys.readouterr().out
    after = sum(file.stat().st_size for file in trained.path.glob("events.log*"))
    assert after < before and "payloads taken away" in out and "bytes before" in out
    assert cli.main(["compact", str(trained.path)]) == 0
    assert "payloads taken away" not in capsys.readouterr().out


def test_the_command_refuses_what_is_written_and_what_is_no_log(
    recorded_run: RecordedRun, tmp_path: Path, capsys: Any
) -> None:
    assert cli.main(["compact", str(recorded_run.path)]) == 2
    assert "another process writes it" in capsys.readouterr().err
    assert cli.main(["compact", str(tmp_path)]) == 2
    assert "no config.yaml or events.log there" in capsys.readouterr().err
    recorded_run.log.close()
    assert cli.main(["compact", str(recorded_run.path)]) == 0
    assert "no segment is closed yet" in capsys.readouterr().out


def test_the_books_close_and_the_summary_is_the_same(trained: RecordedRun) -> None:
    before = books(trained), summarised(trained)
    cli.main(["compact", str(trained.path)])
    assert any(isinstance(f, Delivered) and f.compacted for f in read(trained.path / FILE_NAME))
    assert (books(trained), summarised(trained)) == before
    assert before[1]["merged_whole"] == 0.75
    assert before[1]["tokens_trained"] > 0 and cli.main(["audit", str(trained.path)]) == 0


def test_relearning_is_refused_by_name(trained: RecordedRun, capsys: Any) -> None:
    cli.main(["compact", str(trained.path)])
    capsys.readouterr()
    words = "the trajectories of 2 steps, 1 to 2, were compacted away"
    for act in (Recording.of, recorded_batches):
        with pytest.raises(LogError, match=words):
            act(trained.path)
    assert cli.main(["relearn", str(trained.path)]) == 2
    assert words in capsys.readouterr().err


def test_what_is_gone_is_not_shown_and_counted(trained: RecordedRun) -> None:
    known = [(t.group_id, t.sibling) for _, t, _ in show.rollouts(trained.path)]
    cli.main(["compact", str(trained.path)])
    gone = show.Gone()
    left = [(t.group_id, t.sibling) for _, t, _ in show.rollouts(trained.path, gone=gone)]
    assert len(left) + gone.trained.total() + gone.evaluated == len(known) and set(left) < set(
        known
    )
    assert "8 train rollouts, of steps 1 to 2, and 4 evaluation rollouts were compacted" in str(
        gone
    )
    gone = show.Gone()
    assert list(show.rollouts(trained.path, step=1, gone=gone)) == [] and gone.trained == {1: 4}


def test_a_run_whose_first_segment_is_gone_is_not_taken_for_one_that_never_began(
    folder: Folder,
) -> None:
    path = folder.log().path / FILE_NAME
    path.rename(path.with_name("events.log.000001"))
    assert "events.log: this segment of the event log is missing" in folder.refused()

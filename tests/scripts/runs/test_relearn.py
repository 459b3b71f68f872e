"""Relearning: what is refused, what is left, and what another objective changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.schema import LearnerConfig
from replay.log.history import Recording
from scripts import cli
from scripts.runs import relearn
from tests.scripts.conftest import RecordedRun


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message with which the command ends, with exit code 2."""
    assert cli.main(["relearn", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actors.temperature=2", "only learner.* can be changed"),
        ("seed=3", "only learner.* can be changed"),
        ("objective=cispo", "only learner.* can be changed"),
        ("learner.ranks=2", "learner.ranks is how the run was computed"),
        ("learner.threads=2", "learner.threads is how the run was computed"),
        ("learner.eval_every=2", "learner.eval_every has no effect offline"),
        ("learner.objective=ppo", "learner.objective = 'ppo'"),
        ("learner.kl_estimator=k9", "learner.kl_estimator = 'k9'"),
        ("learner.kl_coef=0.1", "needs an anchor"),
        ("learner.objektive=cispo", "did you mean 'learner.objective'"),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(
    recorded_run: RecordedRun, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    recorded_run.train(0)
    assert words in refusal(capsys, str(recorded_run.path), override)
    assert not list(recorded_run.path.glob("relearn-*"))


def test_every_field_that_is_named_exists() -> None:
    assert {*relearn.HOW_IT_RAN, *relearn.WITHOUT_EFFECT} <= {*LearnerConfig.__struct_fields__}


def test_a_directory_without_a_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"RUN = {str(tmp_path)!r}: no config.yaml or events.log there" in refusal(
        capsys, str(tmp_path)
    )


def test_a_log_without_batches_is_refused(
    recorded_run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no batch was put together" in refusal(capsys, str(recorded_run.path))


@pytest.mark.parametrize(
    ("option", "place", "words"),
    [("--out", "file/x", "cannot be made"), ("--json", "nowhere/x.json", "no such folder")],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_learnt(
    recorded_run: RecordedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    place: str,
    words: str,
) -> None:
    recorded_run.train(0)
    (tmp_path / "file").touch()
    message = refusal(capsys, str(recorded_run.path), option, str(tmp_path / place))
    assert option in message and words in message


def test_the_folder_is_named_after_what_is_different() -> None:
    assert relearn.folder_name([]) == "relearn-recorded"
    changed = ["learner.objective=cispo", "learner.betas=[0.9, 0.99]"]
    assert relearn.folder_name(changed) == "relearn-objective=cispo_betas=-0.9--0.99-"


def test_the_table_has_every_nth_row_and_the_last() -> None:
    rows = [{"step": n, "loss": 0.5, "recorded_loss": None} for n in range(1, 6)]
    table = relearn.table(rows, 3, "title")
    assert list(table.columns[0].cells) == ["1", "4", "5"]
    assert list(table.columns[2].cells) == ["-"] * 3


@pytest.mark.slow
def test_the_recorded_settings_repeat_and_others_differ(
    make_recorded_run: Callable[..., RecordedRun], tiny_model_path: Path, tmp_path: Path
) -> None:
    run = make_recorded_run(str(tiny_model_path))
    for step in range(3):
        run.train(step)
    recording = Recording.of(run.path)
    first = list(relearn.learn(recording, (), 3))
    assert list(relearn.learn(recording, (), 3)) == first
    other = list(relearn.learn(recording, ["learner.objective=reinforce"], 2))
    assert [row["step"] for row in other] == [1, 2]
    assert other[1]["loss"] != first[1]["loss"]
    assert first[0]["anchor_kl"] is None and first[0]["grad_norm"] > 0

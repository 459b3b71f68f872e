"""Relearning: what is refused, what is left, and what another objective changes."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.schema import LearnerConfig
from replay.log.history import Recording
from scripts import cli
from scripts.runs import relearn
from tests.scripts.conftest import RecordedRun
from tests.scripts.parsing import parsed


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


ROW = {"step": 1, "recorded_loss": 0.5, **dict.fromkeys(relearn.GAUGES, -1.0609e-05), "loss": 0.5}


def reported(rows: list[dict[str, Any]], out: Path, changed: Sequence[str] = ()) -> str:
    """What is printed in 80 columns."""
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        relearn.report(rows, out, "run: relearn-x", changed, 1, console)
    return captured.get()


def test_no_number_is_cut_in_80_columns(tmp_path: Path) -> None:
    text = reported([ROW], tmp_path)
    assert "…" not in text and text.count("-1.0609e-05") == len(relearn.GAUGES) - 1
    assert text.count("run: relearn-x") == 1
    assert "1 of 1 losses are those that the run reported" in text


def test_losses_of_another_objective_are_compared_with_nothing(tmp_path: Path) -> None:
    text = reported([ROW], tmp_path, ["learner.objective", "learner.lr"])
    assert "losses are those" not in text
    assert "not compared: learner.objective, learner.lr are not the run's" in text


def test_only_what_is_different_is_changed(recorded_run: RecordedRun) -> None:
    recorded_run.train(0)
    recording = Recording.of(recorded_run.path)
    same = recording.config(1, ()).learner
    overrides = ["learner.objective=cispo", f"learner.lr={same.lr}"]
    assert relearn.changed(recording, overrides) == ["learner.objective"]


def test_options_and_overrides_stand_in_any_order() -> None:
    words = ("run", "learner.lr=1e-4", "--steps", "3", "learner.objective=cispo")
    for turned in (words, (words[2], words[3], *words[:2], words[4])):
        options = parsed("relearn", *turned)
        assert (options.run, options.steps) == (Path("run"), 3)
        assert options.overrides == ("learner.lr=1e-4", "learner.objective=cispo")


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

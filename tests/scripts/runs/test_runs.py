"""Runs side by side."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import ConfigError, save
from configs.schema import Config
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.records import EvaluationFinished, Reported, RunStarted
from replay.protocol import EvalResult
from scripts import cli
from scripts.runs import runs
from scripts.runs.runs import RunsOptions, differences, state_of
from tests.scripts.conftest import as_text

Made = Callable[..., Path]


def result(step: int, em: float) -> EvalResult:
    """An evaluation of ten questions of one hop."""
    return EvalResult(step, 10, em, em, {"1": em}, {"1": em}, 1.5, step, step)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes a run of two evaluations."""

    def make(name: str, last: float = 0.9, **changed: object) -> Path:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        config = Config(run_dir=str(run), **changed)
        save(config, run / "config.yaml")
        records = [
            RunStarted(100.0, config.seed, as_text(config)),
            EvaluationFinished(160.0, result(0, 0.1)),
            Reported(300.0, 1, 7, gauges={"actor/reward": 0.5}),
            EvaluationFinished(460.0, result(7, last)),
        ]
        with EventLog.create(run / FILE_NAME) as log:
            log.append(records)
            log.sync()
        return run

    return make


def test_a_line_says_how_a_run_stands(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made("first"), made("second", 0.4)
    (first / "summary.json").write_text('{"status": "finished"}')
    assert cli.main(["runs", str(first), str(second)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["first", "finished", "7", "0.100", "0.900", "0.900", "0:06:00"]
    assert lines[2].split()[:3] == ["second", "cut", "off"]
    assert len(lines) == 3 and max(map(len, lines)) <= 80  # nothing differs


def test_what_differs_is_told_by_field(made: Made, tmp_path: Path) -> None:
    chosen = [made("a", seed=1), made("b", seed=2)]
    assert differences(chosen) == {"seed": [1, 2]}
    told = tmp_path / "told.json"
    plot = tmp_path / "curves.png"
    runs.runs(RunsOptions(tuple(chosen), plot, told))
    found = json.loads(told.read_text())
    assert found["differences"] == {"seed": [1, 2]}
    assert found["runs"][0]["evaluations"] == {"0": 0.1, "7": 0.9}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_are_told_apart(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [made("a/run"), made("b/run"), made("c")]
    assert runs.names_of(chosen) == ["a/run", "b/run", "c"]
    assert runs.names_of([chosen[0], chosen[0]]) == ["run", "run"]  # one and the same
    assert cli.main(["runs", *map(str, chosen)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "a/run", "b/run", "c",
    ]  # fmt: skip


def test_a_time_that_is_none_is_damage(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    run = made("run")
    with EventLog.open(run / FILE_NAME) as log:
        log.append([Reported(1e18, 1, 8, gauges={})])
        log.sync()
    assert cli.main(["runs", str(run)]) == 0
    said = capsys.readouterr()
    assert "damaged log" in said.out and "1e+18 is no time" in said.err


LONG = "/data/shared/models/Qwen2.5-0.5B-Instruct-warm-"


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["1e-06", "2e-06"], ["1e-06", "2e-06"]),
        ([f"{LONG}a", f"{LONG}b"], ["…ct-warm-a", "…ct-warm-b"]),
        ([f"{LONG}a", "gpt2"], [f"{LONG[:29]}…", "gpt2"]),
        ([f"{LONG}a", "gpt2", f"{LONG}b"], [f"{LONG}a", "gpt2", f"{LONG}b"]),
        ([f"{LONG}a{'x' * 99}", f"{LONG}b"], [f"…ct-warm-a{'x' * 19}…", "…ct-warm-b"]),
        ([LONG, LONG[:40]], [f"…{LONG[32:]}", f"…{LONG[32:40]}"]),
    ],
)
def test_values_that_differ_are_shown_different(values: list[str], shown: list[str]) -> None:
    assert runs.shown_apart(values) == shown


def test_all_of_a_folder_come_newest_first(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = made("old"), made("new")
    os.utime(old / FILE_NAME, (1.0, 1.0))
    (tmp_path / "runs" / "latest").symlink_to(old)
    (tmp_path / "runs" / "synchronous").mkdir()
    (tmp_path / "runs" / "synchronous" / "config.yaml").touch()  # `forage sync` keeps no log
    monkeypatch.chdir(tmp_path)
    assert cli.main(["runs"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["run", "new", "old"]


def test_a_run_that_is_written_runs(made: Made) -> None:
    run = made("live")
    with EventLog.open(run / FILE_NAME):
        assert state_of(run) == "running"
    assert state_of(run) == "cut off just now"


def test_a_summary_that_is_none_says_nothing(made: Made) -> None:
    run = made("run")
    (run / "summary.json").write_text("[" * 200_000)
    assert state_of(run) == "cut off just now"


def test_a_summary_of_an_earlier_launch_says_nothing(made: Made) -> None:
    run = made("resumed")
    (run / "summary.json").write_text('{"status": "finished"}')
    os.utime(run / "summary.json", (time.time() - 7300,) * 2)
    assert state_of(run) == "cut off just now"
    os.utime(run / FILE_NAME, (time.time() - 7200,) * 2)
    assert state_of(run) == "cut off 2 h ago"


def test_a_torn_log_is_told_up_to_there(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    run = made("torn")
    data = (run / FILE_NAME).read_bytes()
    (run / FILE_NAME).write_bytes(data[:-30] + bytes(30))
    assert cli.main(["runs", str(run)]) == 0
    assert "0.100" in capsys.readouterr().out


def test_where_there_is_none_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"no run with an event log in .*: name directories of runs"
    ):
        runs.runs(RunsOptions())
    with pytest.raises(ConfigError, match="no such directory"):
        runs.runs(RunsOptions((tmp_path / "none",)))

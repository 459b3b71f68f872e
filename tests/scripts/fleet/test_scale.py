"""Asking a running launcher for another number of actors."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.runtime.process import make_socket_dir
from scripts import cli
from scripts.fleet.guardian import PID_FILE
from scripts.fleet.scale import FILE_NAME, Wanted


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose launcher is this process."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    directory = make_socket_dir(str(run))
    (directory / PID_FILE).write_text(str(os.getpid()))
    yield run
    (directory / PID_FILE).unlink()
    directory.rmdir()


def test_a_launcher_hears_each_change_once(running: Path) -> None:
    (running / FILE_NAME).write_text("7")  # of an earlier launch
    wanted = Wanted(running)
    assert wanted.change() is None
    assert cli.main(["scale", str(running), "3"]) == 0
    assert (wanted.change(), wanted.change()) == (3, None)
    assert cli.main(["scale", str(running), "2"]) == 0
    assert wanted.change() == 2


def test_what_cannot_be_asked_is_refused(running: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["scale", str(running), "0"]) == 2
    assert "N = 0: at least 1" in capsys.readouterr().err
    assert cli.main(["scale", str(tmp_path / "none"), "2"]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").touch()
    assert cli.main(["scale", str(tmp_path / "other"), "2"]) == 2
    assert "no launcher runs it" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x\n", "0", "-1", "9" * 5000, "3.5", "10001"])
def test_what_is_no_number_of_actors_changes_nothing_and_is_named(
    running: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Wanted(running)
    (running / FILE_NAME).write_text(text)
    assert (wanted.change(), wanted.change()) == (None, None)
    assert caplog.text.count("1 to 10000 actors, as `forage scale` writes it") == bool(text)
    (running / FILE_NAME).write_text("2\n")
    assert wanted.change() == 2

"""Commands as processes of their own: how they end, and how they are told to."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline import commands
from scripts.wiki.pipeline.commands import OutOfTime, forage


def test_what_a_command_prints_goes_to_the_log(tmp_path: Path) -> None:
    forage(["--version"], tmp_path / "log")
    assert (tmp_path / "log").read_text().startswith("forage ")


def test_without_a_log_it_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    forage(["--version"], None)
    shown = capfd.readouterr()
    assert shown.err.startswith("forage ") and not shown.out


@pytest.mark.slow
def test_a_command_that_fails_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(WikiError, match=r"forage show ended with exit code 2: .*log"):
        forage(["show", "none"], tmp_path / "log")


def test_a_command_does_not_outlive_the_one_that_started_it() -> None:
    told = os.environ | {"FORAGE_PARENT": "1"}  # as if that had died before
    command = [sys.executable, "-m", "scripts.cli", "--version"]
    done = subprocess.run(command, cwd=REPOSITORY, env=told, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL and not done.stdout


def test_an_interrupt_ends_the_command_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, before = tmp_path / "begun", signal.getsignal(signal.SIGTERM)
    patient(tmp_path, monkeypatch, 130)
    threading.Thread(target=_stop_once, args=(begun,)).start()
    with pytest.raises(KeyboardInterrupt, match="interrupted by SIGTERM"):
        forage(["train"], tmp_path / "log")
    assert (tmp_path / "log").read_text() == "saved\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("code", "error"), [(130, OutOfTime), (1, WikiError)])
def test_a_command_whose_time_is_over_ends_in_order(
    code: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(tmp_path, monkeypatch, code)
    with pytest.raises(error, match="forage train"):
        forage(["train"], tmp_path / "log", (tmp_path / "begun").exists)
    assert (tmp_path / "log").read_text() == "saved\n"


def test_a_command_that_does_not_end_in_order_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(tmp_path, monkeypatch, None)
    with pytest.raises(OutOfTime):
        forage(["train"], tmp_path / "log", (tmp_path / "begun").exists, patience_s=0.0)
    assert (tmp_path / "log").read_text() in ("", "told\n")


def test_an_interrupted_command_that_does_not_end_in_order_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "DRAIN_S", 0.0)
    patient(tmp_path, monkeypatch, None)
    threading.Thread(target=_stop_once, args=(tmp_path / "begun",)).start()
    with pytest.raises(KeyboardInterrupt, match="interrupted by SIGTERM"):
        forage(["train"], tmp_path / "log")


def patient(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    """Have commands make `folder/begun` and wait; told to end, they save and exit with `code`, or
    never.
    """
    script, told = folder / "python", "echo told" if code is None else f"echo saved; exit {code}"
    made = f"trap '{told}' TERM\ntouch {folder / 'begun'}\n"
    script.write_text(f"#!/bin/sh\n{made}while :; do sleep 0.05; done\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def _stop_once(there: Path) -> None:
    while not there.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

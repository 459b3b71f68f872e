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
from scripts.wiki.pipeline.commands import forage


def test_what_a_command_prints_goes_to_the_log(tmp_path: Path) -> None:
    forage(["--version"], tmp_path / "log")
    assert (tmp_path / "log").read_text().startswith("forage ")


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
    script, before = tmp_path / "python", signal.getsignal(signal.SIGTERM)
    begun = tmp_path / "begun"
    script.write_text(f"#!/bin/sh\ntrap 'echo saved; exit 130' TERM\ntouch {begun}\n{_WAIT}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    threading.Thread(target=_stop_once, args=(begun,)).start()
    with pytest.raises(KeyboardInterrupt, match="interrupted by SIGTERM"):
        forage(["train"], tmp_path / "log")
    assert (tmp_path / "log").read_text() == "saved\n"
    assert signal.getsignal(signal.SIGTERM) is before


_WAIT = "while :; do sleep 0.05; done\n"


def _stop_once(there: Path) -> None:
    while not there.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

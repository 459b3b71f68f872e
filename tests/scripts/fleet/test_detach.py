"""A launcher that goes on by itself: what it says and where, how it ends, who may end it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs.runtime.process import REPOSITORY, Exit
from scripts import cli
from scripts.fleet import detach
from scripts.fleet.console import Console
from tests.scripts.terminals import run_in_terminal

# What a launcher does, with stand-ins for its checks and its processes.
LAUNCHER = """
import signal, sys
from pathlib import Path
from configs.runtime.process import die_with_parent
from scripts.fleet.detach import is_detached, loose

class Said:
    def moved(self):
        return "checked" + chr(10)

die_with_parent()
print("checked", flush=True)
if sys.argv[2] == "refuses":
    sys.exit(2)
assert is_detached()
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
with loose(Said(), Path(sys.argv[1])) as started:
    print("placing", flush=True)
    if sys.argv[2] == "fails":
        sys.exit("no room for it")
    if sys.argv[2] == "dies":
        signal.raise_signal(signal.SIGKILL)
    if sys.argv[2] == "goes on":
        started()
    print("at work", sys.stdout.isatty(), flush=True)
    signal.pause()
"""
COMMAND = "import sys; from scripts.fleet.detach import detached; sys.exit(detached(sys.argv[1:]))"
DEADLINE_S = 60.0


def launched(log: Path, how: str) -> tuple[int, str]:
    """The exit code of the command, and what its terminal was told until that was closed."""
    return run_in_terminal(["-c", COMMAND, "-c", LAUNCHER, str(log), how])


def test_a_launcher_goes_on_when_its_terminal_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("of an earlier start\n")
    code, said = launched(log, "goes on")
    assert code == Exit.DONE and "checked\r\nplacing\r\n" in said
    pid = int(re.findall(r"kill -INT (\d+)", said)[0])
    assert f"tail -f {log}" in said and "earlier start" not in said
    launcher = psutil.Process(pid)
    assert os.getsid(pid) == pid and launcher.terminal() is None
    launcher.send_signal(signal.SIGHUP)
    end = time.monotonic() + DEADLINE_S
    while not log.read_text().endswith("at work False\n") and time.monotonic() < end:
        time.sleep(0.02)
    assert log.read_text() == "of an earlier start\nchecked\nplacing\nat work False\n"
    launcher.send_signal(signal.SIGINT)
    while lives(launcher) and time.monotonic() < end:
        time.sleep(0.02)
    assert not lives(launcher)


def lives(process: psutil.Process) -> bool:
    """False also of one that nobody has waited for."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("refuses", 2, "checked\r\n"),
        ("fails", 1, "checked\r\nplacing\r\nno room for it\r\nsee "),
        ("dies", 1, "checked\r\nplacing\r\nforage: the launcher was ended by SIGKILL\r\nsee "),
    ],
)
def test_a_launcher_that_ends_before_is_shown_to_its_end(
    how: str, code: int, said: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    found, told = launched(log, how)
    assert found == code and told.startswith(said)
    assert log.exists() == (how != "refuses")


def test_an_interrupt_before_is_handed_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = [sys.executable, "-c", COMMAND, "-c", LAUNCHER, str(log), "waits"]
    command = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    end = time.monotonic() + DEADLINE_S
    while not (log.exists() and "at work" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    command.send_signal(signal.SIGINT)
    assert command.wait(DEADLINE_S) == Exit.INTERRUPTED


def test_in_the_foreground_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGHUP)
    with detach.loose(Console(), Path("/none/log")) as started:
        started()
        print("here")
    assert capsys.readouterr().out == "here\n" and signal.getsignal(signal.SIGHUP) is before


def test_a_word_of_trust_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(detach, "detached", lambda words: seen.append(words) or 0)
    words = ["resume", "runs/mine", "--trust", "--detach", "learner.total_steps=9"]
    assert cli.main(words) == Exit.DONE
    (given,) = seen
    assert given[2:] == ["resume", "runs/mine", "--trust", "learner.total_steps=9"]

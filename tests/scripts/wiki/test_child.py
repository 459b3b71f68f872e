"""Programs of others end with us: in order, and when we are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from scripts.wiki import child

_BUILD = """
import sys
from pathlib import Path
from scripts.wiki import packages, wiki
package = packages.Package("pip", "a", "1.0", "a-1.0-py3-none-any.whl", "sha256:" + "0" * 64, 1)
packages._PIP = Path(sys.argv[2]).read_text()
wiki.fetch = lambda wanted, folder: packages.fetch([package], folder)
try:
    wiki.build(Path(sys.argv[1]), 0, print)
except KeyboardInterrupt:
    sys.exit(130)
"""
_PATIENT = """
import os, sys, time
from pathlib import Path
Path({begun!r}).write_text(str(os.getpid()))
time.sleep(120)
"""


def test_what_a_program_says_and_ends_with_is_told(tmp_path: Path) -> None:
    program = "import sys\nprint(sys.argv[1])\nsys.exit(os.environ['X'])"
    code, said = child.run(f"import os\n{program}", ["one"], tmp_path / "log", {"X": "two"})
    assert (code, said.splitlines()) == (1, ["one", "two"])


def test_a_program_that_does_not_end_is_ended_at_the_deadline(tmp_path: Path) -> None:
    code, said = child.run("import time\ntime.sleep(60)", [], tmp_path / "log", deadline_s=0.5)
    assert code == -signal.SIGKILL and "ended by us: not done after 0.5 s" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 130), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_while_files_are_made_leaves_no_child(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    begun, pip, cache = tmp_path / "begun", tmp_path / "pip.py", tmp_path / "cache"
    pip.write_text(_PATIENT.format(begun=str(begun)))
    command = [sys.executable, "-c", _BUILD, str(cache), str(pip)]
    parent = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        assert _until(lambda: begun.exists() and begun.read_text() != "")
        process = int(begun.read_text())
        parent.send_signal(number)
        assert parent.wait(30) == code
        assert _until(lambda: _has_ended(process))
    finally:
        parent.kill()
        parent.wait()
    half_made = list((cache / "packages").glob("*"))
    assert bool(half_made) == (number == signal.SIGKILL)  # the next make wiki removes it


def _until(condition: Callable[[], bool], patience_s: float = 60.0) -> bool:
    end = time.monotonic() + patience_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def _has_ended(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1].startswith("Z")
    return True

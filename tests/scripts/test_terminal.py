"""What is shown in a terminal, and instead of it where there is none."""

import time
from pathlib import Path

import pytest

from scripts import terminal
from tests.scripts.terminals import run_in_terminal

STATUS = """
import sys
from scripts.terminal import Bars, status
with status("making ready"):
    out = sys.stdout
    print("first")
with Bars() as bars:
    for _ in bars.track(range(2), description="asking"):
        print("then")
print("last", file=out)
"""


def test_what_is_printed_meanwhile_goes_where_it_is_meant_to(tmp_path: Path) -> None:
    code, told = run_in_terminal(["-c", STATUS], out=tmp_path / "out")
    assert (code, (tmp_path / "out").read_text()) == (0, "first\nthen\nthen\nlast\n")
    assert "making ready" in told and "asking" in told and "first" not in told


@pytest.mark.parametrize("text", ["making ready", "reading: 2 of 7"])
def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setattr(terminal, "FIRST_S", 0.02)
    bars = terminal.Bars()
    bars.add_task("reading ", total=7, completed=2)
    with bars if ":" in text else terminal.status(text):
        end, told = time.monotonic() + 20, ""
        while not told and time.monotonic() < end:
            time.sleep(0.02)
            told = capsys.readouterr().err
    assert told == f"{text} (0 s)\n"

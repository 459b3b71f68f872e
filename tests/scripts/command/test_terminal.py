"""What is shown in a terminal, and instead of it where there is none."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from configs.runtime.process import REPOSITORY
from scripts.command import terminal
from tests.scripts.terminals import run_in_terminal

STATUS = """
import sys
from scripts.command.terminal import Bars, status
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


CHATTER = """
import os, pathlib, sys
from scripts.command.terminal import Bars, chatter_to
with chatter_to(pathlib.Path(sys.argv[1])) as terminal, Bars(file=terminal):
    os.system("echo a child; echo its warning >&2")
    print("a library", file=sys.stderr)
    print("progress", file=terminal)
print("done")
raise SystemExit("an error")
"""


def test_what_libraries_say_goes_to_a_file_and_errors_do_not(tmp_path: Path) -> None:
    code, told = run_in_terminal(["-c", CHATTER, str(tmp_path / "log")])
    lines = re.sub(r"\x1b\[[\d?]*\w", "", told).replace("\r", "").split("\n")
    assert (code, [*filter(None, lines)]) == (1, ["progress", "done", "an error"])
    said = (tmp_path / "log").read_text().splitlines()
    assert sorted(said) == ["a child", "a library", "its warning"]


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


def test_without_a_terminal_what_is_tracked_counts_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "FIRST_S", 0.02)
    monkeypatch.setattr(terminal, "EVERY_S", 0.02)
    with terminal.Bars() as bars:
        for step in bars.track(range(9), 9, description="learning"):
            end, told = time.monotonic() + 20, ""
            while f"learning: {step} of 9" not in told and time.monotonic() < end:
                time.sleep(0.02)
                told += capsys.readouterr().err
            assert f"learning: {step} of 9" in told


BETWEEN = """
import time
from scripts.command.terminal import awaited
def slow():
    for step in range(2):
        time.sleep(0.3)
        yield step
for step in awaited(slow(), "reading"):
    print(f"step {step}")
"""


def test_what_is_printed_between_awaited_items_stands_beside_no_spinner() -> None:
    code, told = run_in_terminal(["-c", BETWEEN])
    # Each spinner's line is erased before a line of ours.
    assert code == 0 and len(re.findall(r"\x1b\[2K(?:\x1b\[\?25h)?step \d\r\n", told)) == 2
    assert told.count("reading") >= 2


BESIDE_CHATTER = """
import pathlib, sys
from scripts.command.terminal import chatter_to, status
with chatter_to(pathlib.Path(sys.argv[1])) as terminal, status("making ready", terminal):
    print("a library", file=sys.stderr)
"""


def test_a_status_is_shown_beside_chatter_that_is_not(tmp_path: Path) -> None:
    code, told = run_in_terminal(["-c", BESIDE_CHATTER, str(tmp_path / "log")])
    assert (code, (tmp_path / "log").read_text()) == (0, "a library\n")
    assert "making ready" in told and "a library" not in told


COMPLAINT = """
from scripts.command.terminal import complain
complain("model.path = '/a/folder/whose/name/is/far/longer/than/a/line/of/this/one': no usable "
    "model-folder there\\nlearner.lr = -1.0: give a number above 0")
"""


def test_an_error_breaks_at_words_in_a_terminal_and_nowhere_else() -> None:
    code, told = run_in_terminal(["-c", COMPLAINT], columns=40)
    assert (code, told.replace("\r", "").splitlines()) == (
        0,
        [
            "forage: model.path =",
            "  '/a/folder/whose/name/is/far/longer/than/a/line/of/this/one':",
            "  no usable model-folder there",
            "learner.lr = -1.0: give a number above 0",
        ],
    )
    piped = subprocess.run(
        [sys.executable, "-c", COMPLAINT], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert [line.split()[-1] for line in piped.stderr.splitlines()] == ["there", "0"]


WORDS = st.lists(
    st.one_of(
        st.text("ab質問é\u0301ü\u0308\u0489한\u200d\ufe0f☺👩", max_size=70),
        st.sampled_from(
            ["\t", "  ", "\u3000", "質問" * 40, "x" * 130, "e\u0301" * 50, f"{'x' * 90}/"]
        ),
    ),
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["", "    ", "\t", " " * 90]), WORDS, st.integers(8, 100))
@example("", ["\u200d\u200daaa" + "質" * 3], 8)
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(
    indent: str, words: list[str], width: int
) -> None:
    text = indent + " ".join(words)
    lines = terminal.broken(text, width).split("\n")
    assert all("/" in line for line in lines if cell_len(line) > width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    if cell_len(text) <= width and "\t" not in text:
        assert lines == [text.rstrip()]


@pytest.mark.parametrize("path", [f"'/data/{'質問' * 30}'", f"http://[::1]:8/{'a' * 90}"])
def test_a_path_is_never_folded(path: str) -> None:
    text = f"  see {path} " + "質問" * 30
    lines = terminal.broken(text, 40).split("\n")
    assert lines[:2] == ["  see", f"    {path}"] and max(map(cell_len, lines[2:])) <= 40
    assert terminal.broken(f"  {path}", 40) == f"  {path}"


def test_tabs_go_to_the_next_stop_in_cells() -> None:
    assert terminal.broken("質問\tb\tc", 80) == "質問    b       c"


def test_the_time_left_is_reckoned_also_where_a_step_takes_minutes() -> None:
    bars, now = terminal.Bars(), 0.0
    bars.get_time = lambda: now
    steps = bars.add_task("learning", total=10)
    for _ in range(3):
        now += 100
        bars.advance(steps)
    assert bars.tasks[0].time_remaining == 700


ABOVE = """
from scripts.command.terminal import Bars, above
with Bars() as bars:
    for step in bars.track(range(2), description="learning"):
        above(f"step {step}: [loss]")
"""


def test_a_line_stands_above_the_bars_never_behind_them(tmp_path: Path) -> None:
    code, told = run_in_terminal(["-c", ABOVE])
    assert code == 0 and len(re.findall(r"(?:\n|\x1b\[2K)step \d: \[loss\]\r\n", told)) == 2
    code, told = run_in_terminal(["-c", ABOVE], out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "step 0: [loss]\nstep 1: [loss]\n"


def test_what_a_terminal_would_obey_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\x07\x9b31m\r\u202eb\u2066c\u200f\u061c\n\t[red]d \u00e9 \u65e5"
    kept = "a[2J31mbc\n\t[red]d \u00e9 \u65e5"
    assert terminal.clean(evil) == kept
    terminal.complain(evil)
    assert capsys.readouterr().err == f"forage: {kept}\n"

"""`forage view`: served until it is interrupted, written into one file, or refused in a line."""

import importlib.util
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from urllib.request import urlopen

import pytest

from configs.runtime.process import REPOSITORY
from learner.health.sentinels import FILE_NAME as SENTINELS
from scripts import cli
from scripts.view import view
from tests.scripts.conftest import RecordedRun
from tests.scripts.view.conftest import HOSTILE, KEPT, keep_tokens


class Elements(HTMLParser):
    """The elements of a page, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = list[tuple[str, dict[str, str | None]]]()
        self.data, self._inside = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


@pytest.fixture(autouse=True)
def own_signals() -> object:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_file_holds_all_and_asks_nobody(
    hostile_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pages.html"
    words = ["view", str(hostile_run), "--export", str(file), "--rollouts", "2"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"{file}\n"
    page = Elements(file.read_text())
    data = json.loads(page.data)
    tags = [tag for tag, _ in page.found]
    assert tags.count("script") == 2 and tags.count("style") == 1 and "b" not in tags
    links = [value for _, found in page.found for name, value in found.items()
             if name in ("src", "href")]  # fmt: skip
    assert links == ["data:,"]
    policies = [found["content"] for _, found in page.found if "http-equiv" in found]
    assert policies and "default-src 'none'" in str(policies[0])
    assert data["rollouts"]["count"] == 3 and len(data["rollouts"]["rows"]) == 2
    assert data["rollouts"]["rows"][0]["question"] == KEPT and HOSTILE not in page.data
    turn = data["details"][f"0/{data['rollouts']['rows'][0]['number']}"]["sequences"][0]["turns"][0]
    assert "".join(turn["tokens"]) == KEPT
    (found,) = data["timelines"]
    assert found["bins"] > 800 and [lane["kind"] for lane in found["lanes"]] == [
        "learner", "replay",
    ]  # fmt: skip


def test_a_file_takes_along_what_the_learner_made_of_tokens(
    recorded_run: RecordedRun, tmp_path: Path
) -> None:
    keep_tokens(recorded_run.path, recorded_run.train(0))
    words = ["view", str(recorded_run.path), "--export", str(file := tmp_path / "pages.html")]
    assert cli.main(words) == 0
    data = json.loads(Elements(file.read_text()).data)
    shown = [data["details"][f"0/{row['number']}"] for row in data["rollouts"]["rows"]
             if row["step"] == 1]  # fmt: skip
    turns = [turn for each in shown for turn in each["sequences"][0]["turns"]]
    assert len(turns) == 8 and all(len(turn["learnt"]["current"]) == 4 for turn in turns)


def test_a_file_has_rollouts_of_each_run_and_those_that_sentinels_lead_to(
    hostile_run: Path, recorded_run: RecordedRun, tmp_path: Path
) -> None:
    for step in range(3):
        recorded_run.train(step)
    line = {"step": 1, "gauges": {}, "fired": ["ess"]}
    (recorded_run.path / SENTINELS).write_text(json.dumps(line) + "\n")
    words = ["view", str(hostile_run), str(recorded_run.path), "--rollouts", "3", "--export"]
    file = tmp_path / "pages.html"
    assert cli.main([*words, str(file)]) == 0
    found = json.loads(Elements(file.read_text()).data)["rollouts"]
    of_runs = Counter(row["run"] for row in found["rows"])
    of_step = [row for row in found["rows"] if row["run"] == 1 and row["step"] == 1]
    assert of_runs == {0: 1, 1: 2 + 4} and len(of_step) == 4 and found["count"] > 7
    assert cli.main([*words[:4], "9", "--export", str(file)]) == 0
    rows = json.loads(Elements(file.read_text()).data)["rollouts"]["rows"]
    assert Counter(row["run"] for row in rows)[0] == 3  # all that it has; the other has the rest
    assert len({row["number"] for row in rows if row["run"] == 1}) >= 6
    assert cli.main([*words[:4], "0", "--export", str(file)]) == 0
    assert json.loads(Elements(file.read_text()).data)["rollouts"]["rows"] == []


def test_a_link_is_followed_once(
    recorded_run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lead to another run later."""
    (latest := tmp_path / "latest").symlink_to(recorded_run.path)
    monkeypatch.setattr(view, "page", lambda index, _: str([each.path for each in index.runs]))
    file = tmp_path / "x.html"
    assert cli.main(["view", str(latest), str(recorded_run.path), "--export", str(file)]) == 0
    assert file.read_text() == str([recorded_run.path])


def test_a_bound_on_pages_that_show_all_is_refused(
    hostile_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["view", str(hostile_run), "--rollouts", "2"]) == 2
    assert "--rollouts 2: pages that are served show all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--json", "x.json"], "--json 'x.json': it is what --check finds"),
        (["--check", "--export", "x.html"], "--check --export: pages in a file are not checked"),
        (["--check"], "by Playwright, which is not installed here: "),
    ],
)
def test_a_check_that_cannot_be_is_refused(
    hostile_run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    complaint: str,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "playwright" else found(name)
    )
    assert cli.main(["view", str(hostile_run), *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_a_check_that_finds_faults_has_failed(
    hostile_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {
        "pages": {},
        "console_errors": ["health: no \x1b[31m"],
        "foreign_requests": ["http://elsewhere/"],
        "first_paint_s": None,
        "rows": 3,
    }
    monkeypatch.setattr(view, "browser", lambda: nullcontext(None))
    monkeypatch.setattr(view, "check", lambda *_: told)
    file = tmp_path / "found.json"
    assert cli.main(["view", str(hostile_run), "--check", "--json", str(file)]) == 1
    said = capsys.readouterr()
    assert "view: health: no [31m\nview: asked elsewhere: http://elsewhere/\n" in said.err
    assert said.out == "0 pages, 3 rollouts: 2 faults\n" and json.loads(file.read_text()) == told


def test_a_damaged_log_is_told_up_to_there(
    recorded_run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_run.train(0)
    log = recorded_run.path / "events.log"
    content = bytearray(log.read_bytes())
    content[-300] ^= 1
    log.write_bytes(content)
    assert cli.main(["view", str(recorded_run.path), "--export", str(tmp_path / "x.html")]) == 0
    assert "view: told up to here: " in capsys.readouterr().err
    overview = json.loads(Elements((tmp_path / "x.html").read_text()).data)["overview"]
    assert "checksum does not agree" in overview["runs"][0]["damage"]


def test_a_terminal_that_is_closed_ends_it_and_leaves_nothing(
    recorded_run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where that is to be ignored, as under nohup."""
    (place := tmp_path / "place").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    for handler, says in (
        (signal.SIG_DFL, pytest.raises(KeyboardInterrupt)),
        (signal.SIG_IGN, nullcontext()),
    ):
        signal.signal(signal.SIGHUP, handler)
        with says, view._index([recorded_run.path]):
            assert list(place.glob("forage-view-*"))
            signal.raise_signal(signal.SIGHUP)
        assert not list(place.iterdir())


def test_an_index_without_room_is_told(
    recorded_run: RecordedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("scripts.view.spans.keep", full)
    assert cli.main(["view", str(recorded_run.path), "--export", str(tmp_path / "x.html")]) == 0
    said = capsys.readouterr().err
    assert "view: the index cannot be written: database or disk is full: is there room in" in said


def test_a_torn_end_is_told_once_the_run_has_ended(
    recorded_run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever writes it may complete it while the run lives."""
    recorded_run.train(0)
    log = recorded_run.path / "events.log"
    with log.open("r+b") as content:
        content.truncate(log.stat().st_size - 3)
    file = tmp_path / "x.html"
    for ended in (False, True):
        if ended:
            recorded_run.log.close()
        assert cli.main(["view", str(recorded_run.path), "--export", str(file)]) == 0
        (run,) = json.loads(Elements(file.read_text()).data)["overview"]["runs"]
        assert ("the file ends inside a record" in run["damage"]) == ended
        assert ("view: told up to here: " in capsys.readouterr().err) == ended
        assert run["state"] == ("cut off just now" if ended else "running")


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["/nowhere"], 2, "RUN = '/nowhere': there is no such directory"),
        ([], 2, "view: name 'RUNS', run directories"),
        (["{run}", "--port", "-1"], 2, "--port -1: at least 0"),
        (["{run}", "--export", "/nowhere/x.html"], 2, "--export '/nowhere/x.html': there is no"),
        (["{run}", "--export", "{run}"], 2, "': it is a folder: name a file in it"),
        (["{run}", "--check", "--json", "/tmp"], 2, "--json '/tmp': it is a folder"),
        (["{run}", "--check", "--json", "/nowhere/x.json"], 2, "--json '/nowhere/x.json': there"),
        (["{other}"], 2, "format version 9, this program reads"),
    ],
)
def test_bad_input_is_refused_in_a_line(
    recorded_run: RecordedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    complaint: str,
) -> None:
    (other := tmp_path / "other").mkdir()
    content = bytearray((recorded_run.path / "events.log").read_bytes())
    content[8] = 9
    (other / "events.log").write_bytes(content)
    given = [word.format(run=recorded_run.path, other=other) for word in words]
    assert cli.main(["view", *given]) == code
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_it_is_told_to_end_and_leaves_nothing(
    make_recorded_run: Callable[..., RecordedRun], tmp_path: Path, how: signal.Signals
) -> None:
    run = make_recorded_run()
    anew = ("env", "--default-signal=HUP")  # which whoever runs this may ignore
    command = [*anew, sys.executable, "-m", "scripts.cli", "view", str(run.path)]
    places = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=places, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", url)
        with urlopen(f"{url}api/overview", timeout=30) as answer:
            assert json.load(answer)["runs"][0]["name"] == run.path.name
        stream = urlopen(f"{url}api/live", timeout=30)  # a page that stays
        assert stream.readline().startswith(b"data: ")
        process.send_signal(how)
        try:
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0 and "Traceback" not in said
    assert not list(tmp_path.glob("forage-view-*"))

"""The pages in a real browser, and the front end built anew."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from hashlib import blake2s
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from configs.load import save
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from learner.health.sentinels import FILE_NAME as SENTINELS
from learner.metrics.applications import FILE_NAME as APPLICATIONS
from replay.log.event_log import EventLog
from replay.log.records import GroupDropped, Leased, Reported, StepsCommitted
from replay.protocol import Status
from replay.trajectory import Search, StopReason, TokenSequence, Turn
from scripts.bench.harness import status_bytes
from scripts.runs.books import Audit
from scripts.runs.waits_file import WaitsFile
from scripts.runs.waits_log import FILE_NAME as STANDINGS
from scripts.view.index import Index
from scripts.view.server import BUILT, Following, Server, listener
from tests.scripts.conftest import RecordedRun
from tests.scripts.view.conftest import KEPT, delivery, keep_tokens
from tests.scripts.view.generated import GeneratedRun

PINS = ("playwright==1.65.2",)
KEY = "a-key"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def program(name: str, package: str) -> str:
    """The path of a program of the system's."""
    return shutil.which(name) or pytest.skip(f"{name} is not installed: apt-get install {package}")


def run(*words: object, **settings: Any) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **settings)
    assert not done.returncode, f"{done.stdout}{done.stderr}"
    return done.stdout


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """A folder in `.cache`, made once."""
    found = REPOSITORY / ".cache" / name
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            make(draft := Path(folder, name))
            draft.rename(found)
    return found


@pytest.fixture(scope="module")
def playwright() -> Path:
    """The Python of an environment with Playwright alone."""

    def make(draft: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", draft)
        pip = ("-m", "pip", "--python", draft / "bin" / "python", "install", "--quiet")
        run(sys.executable, *pip, "--no-compile", *PINS)

    digest = blake2s(repr((PINS, sys.version)).encode(), digest_size=8).hexdigest()
    return kept(f"playwright-{digest}", make) / "bin" / "python"


@pytest.fixture(scope="module")
def look(playwright: Path) -> Callable[[str], "subprocess.Popen[str]"]:
    """look(url): a browser that looks at the pages there."""
    chromium = program("chromium", "chromium")
    script = Path(__file__).with_name("browser.py")

    def started(url: str) -> "subprocess.Popen[str]":
        words = [str(playwright), str(script), chromium, url]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return started


def faults() -> dict[str, Any]:
    """All at once by which rollouts are told apart, but for the fate of the group."""
    ids = np.array([5, 6], np.int32)
    searches = (Search("kelu", (), 0.1, "empty"),) * 2
    turn = Turn(ids, np.zeros(2, np.float32), ids, ids, searches, malformed=True)
    return {"sequences": (TokenSequence(ids, (turn,)),), "stop_reason": StopReason.TURN_LIMIT}


@pytest.fixture
def served(
    index_of: Callable[..., Index], recorded_run: RecordedRun, hostile_run: Path
) -> Iterator[str]:
    """The address of the pages of two runs, and of one whose log is damaged."""
    keep_tokens(recorded_run.path, recorded_run.train(0))
    parts = {f"actor/reward/{part},{'é' * 3900}": 0.1 for part in range(8)}
    recorded_run.report(1, {"actor/reward": 0.5, "learner/loss": 0.1, **parts})
    recorded_run.append(*[StepsCommitted(1.0, 1, 1)] * 2001)
    for number in range(1000, 1300):
        given = faults() if number == 1000 else {}
        recorded_run.append(Leased(1.0, "actor", number, (0,), (0,)), *delivery(number, **given))
    recorded_run.append(GroupDropped(2.0, 1000, "no_signal"))
    recorded_run.append(Reported(2.0, 1, 1, {"sync/refits": 1.0}))
    save(Config(run_dir=str(recorded_run.path)), recorded_run.path / "config.yaml")
    gauges = [
        {"learner/current_ess": 0.5 + step / 99, "learner/entropy": 1.0} for step in range(12)
    ]
    fired = [["ess"] * (step > 9 or step == 3) for step in range(12)]
    notes = [
        {"step": step, "gauges": gauges[step], "fired": each} for step, each in enumerate(fired)
    ]
    (recorded_run.path / SENTINELS).write_text("\n".join(map(json.dumps, notes)) + "\n")
    (recorded_run.path / APPLICATIONS).write_text('[1.9, "actor", 1, 0.3, 0.1]\n')
    (recorded_run.path / STANDINGS).write_text('[1.0, "actor", 5, 0, 2, 1, 50]\n[2.0, "act')
    (torn := hostile_run.with_name("torn")).mkdir()
    with EventLog.create(torn / "events.log") as log:
        log.append([StepsCommitted(1.0, 1, step) for step in range(9)])
        log.sync()
    content = bytearray((torn / "events.log").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (torn / "events.log").write_bytes(content)
    index = index_of(recorded_run.path, hostile_run, torn)
    following = Following(index)
    server = Server(index, following, KEY)
    with listener(0) as found:
        serving = threading.Thread(target=server.run, args=([found],), daemon=True)
        following.start()
        serving.start()
        yield f"http://127.0.0.1:{found.getsockname()[1]}/{KEY}/"
        following.leaving = server.should_exit = True
        serving.join(30)
        following.stop()


GROUNDS = {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 24, 27)"}


def seen(browser: "subprocess.Popen[str]") -> dict[str, Any]:
    said, errors = browser.communicate(timeout=240)
    assert not browser.returncode, errors
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    for way, width in (("light", 400), ("dark", 1300)):
        page = found[f"{way} {width}"]
        assert page["errors"] == [] == page["foreign"] and page["ground"] == GROUNDS[way]
        assert set(page["widths"].values()) == {width}
    for way, width in (("light", 1300), ("dark", 400)):
        page = found[way]
        assert page["ground"] == GROUNDS[way]
        assert page["errors"] == [] == page["foreign"]
        assert set(page["widths"].values()) == {width}  # nothing is wider than the window
        assert page["title"] == "Forage: Rollouts" and page["picked"] == 1
        assert page["question"] == KEPT == page["action"]
        assert page["readout"].startswith('turn 1, token 1 "<"') and "version 0" in page["readout"]
        assert "probability 0.6065, log -0.5" in page["readout"] != page["further"]
        assert "text=script" in page["address"]
        assert page["lanes"][:1] == ["events"] and page["lanes"][-4:-1] == [
            "learner", "replay", "versions",
        ]  # fmt: skip
        for way_there in ("clicked", "entered"):
            assert re.match(r"rollouts\?run=0&time_from=\d.*&time_to=\d", page[way_there])
    return found


def test_the_pages_are_used_live_by_mouse_and_keyboard(
    look: Callable[[str], Any], served: str, recorded_run: RecordedRun
) -> None:
    browser = look(served)
    for step in range(1, 6):  # news, while something is held
        assert browser.stdout.readline() == "waiting\n"
        recorded_run.append(StepsCommitted(1.5, 1, step))
    assert browser.stdout.readline() == "waiting\n"
    recorded_run.now = 2.1  # after all others
    recorded_run.train(1)
    assert browser.stdout.readline() == "waiting\n"
    recorded_run.append(StepsCommitted(2.5, 1, 1))
    told = Status((), (), {}, {"actor": {"retrieval/in_flight": 2.0}}, "", "")
    WaitsFile(recorded_run.path).tell(told, {})
    found = seen(browser)["light"]
    assert found["kept"] == [True, True, 1, "fired-ess-0", "Rollouts"] and found["held"] == 1
    (damage,) = found["damage"]
    assert re.match(r"Told up to here: .*torn.events\.log: offset \d+: ", damage)
    assert found["late"] == [True] and found["pressed"] == [True] * 3 and found["live"] == ["live"]
    assert found["still_sorted"] == ["ascending", True]
    assert found["chips"] == ["1 picked", "1 picked"] and found["sorted"] == ["ascending", True]
    assert found["parts"] == 8
    assert "Exact match, held out: 2 hops" in found["captions"]
    named = [each for each in found["captions"] if each.startswith("Exact match, held out: <scr")]
    assert [each.endswith(KEPT) for each in named] == [False, True]  # hops, and a set
    assert found["bounds"][0] == "bound: 0.8" and len(found["bounds"]) > 1
    assert any(each.endswith(f" of {recorded_run.path.name}") for each in found["bounds"])
    assert re.search(r"The newest 200 of 2,\d+\. Charts mark the newest 2,000\.", found["events"])
    assert found["lanes"][2:4] == ["actor: engine", "weights"] and not found["lacks"]
    assert "lease 5" in found["pointed"]
    assert found["events"].count("sent again") == 1
    assert "actor waits for retrieval 2 calls of rollouts that search" in found["waits"]
    assert found["lanes"][1] == "actor" and "actor=actor" in found["clicked"]
    assert found["of_time"] == "300 rollouts" and "other 300" in found["pointed"]
    assert found["caused"] == [
        f"rollouts of 3 steps: 3, 10-11, {recorded_run.path.name}", "3,10-11", "0 rollouts",
    ]  # fmt: skip
    assert "\nlog-probability behaviour " in found["learnt"], found["learnt"]
    assert found["learnt"].endswith("; advantage 0; masked")
    assert found["cards"] == [recorded_run.path.name, "<b>run", "torn"] and found["charts"] >= 2
    assert found["count"].endswith(" rollouts") and found["scripts"] == 1
    assert 4 < found["drawn"] < 100  # of some 310
    assert re.fullmatch(r"question \d+ \?", found["last"])


def test_so_is_a_file(look: Callable[[str], Any], hostile_run: Path, tmp_path: Path) -> None:
    with EventLog.open(hostile_run / "events.log") as log:
        log.append([*delivery(9, **faults()), GroupDropped(2.0, 9, "no_signal")])
        log.sync()
    file = tmp_path / "pages.html"
    words = ("-m", "scripts.cli", "view", hostile_run, "--export", file)
    run(sys.executable, *words, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    found = seen(look(f"file://{file}"))["light"]
    assert found["cards"] == ["<b>run"] and found["count"] == "4 rollouts" and found["lacks"]
    for curve in ("EM", "1 hop", "2 hops", KEPT.split()[0]):
        assert curve in found["evaluated"]


def test_a_check_opens_every_page(playwright: Path, hostile_run: Path, tmp_path: Path) -> None:
    program("chromium", "chromium")
    (packages,) = playwright.parent.parent.glob("lib/*/site-packages")
    words = ("-m", "scripts.cli", "view", hostile_run, "--check", "--json", tmp_path / "found.json")
    places = os.pathsep.join((str(REPOSITORY), str(packages)))
    said = run(sys.executable, *words, env=os.environ | {"PYTHONPATH": places})
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["pages"]) == ["overview", "rollouts", "health", "timeline"]
    assert found["console_errors"] == [] == found["foreign_requests"] and found["rows"] == 3
    assert 0 < found["first_paint_s"] < 60 and said.startswith("4 pages, 3 rollouts, first paint ")


def wait_until_there(url: str) -> None:
    """Wait until somebody answers."""
    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(url):
            return
        time.sleep(0.1)
    pytest.fail(f"nobody answers at {url}")


@pytest.mark.soak("view")
@pytest.mark.timeout(1800)
def test_nobody_waits_on_the_pages_of_a_hundred_thousand_rollouts(
    playwright: Path, bpe_tokenizer: Any, tmp_path: Path
) -> None:
    chromium = program("chromium", "chromium")
    written = GeneratedRun(tmp_path / "run", bpe_tokenizer)
    written.write(100_000)
    books = Audit()
    books.fold(written.path / "events.log")
    assert books.faults == []
    words = (sys.executable, "-m", "scripts.cli", "view", str(written.path))
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        wait_until_there(url)
        watch = Path(__file__).with_name("stopwatch.py")
        said = run(playwright, watch, chromium, url, f"{written.delivered:,} rollouts", timeout=900)
        peak_bytes = status_bytes("VmHWM", server.pid)
        server.send_signal(signal.SIGINT)
    found = json.loads(said)
    assert found.pop("errors") == [] == found.pop("foreign")
    paints = found.pop("first_paint_s")
    waits_ms = {name: median(times) for name, times in found.items()}
    print(f"{written.delivered:,} rollouts: first paint {paints} s, then (median) {waits_ms} ms; "
          f"the server's peak {peak_bytes / 1e6:.0f} MB")  # fmt: skip
    assert max(paints.values()) <= 2.0 and max(waits_ms.values()) <= 200.0
    assert peak_bytes <= 300e6


def test_what_is_served_is_built_from_its_sources(tmp_path: Path) -> None:
    npm = program("npm", "npm")
    sources = BUILT.parent / "web"
    lock = (sources / "package-lock.json").read_bytes()

    def make(draft: Path) -> None:
        draft.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(sources / name, draft)
        run(npm, "ci", "--no-audit", "--no-fund", cwd=draft)

    modules = kept(f"view-{blake2s(lock, digest_size=8).hexdigest()}", make) / "node_modules"
    ignored = shutil.ignore_patterns("node_modules")
    shutil.copytree(sources, tmp_path / "web", ignore=ignored)
    (tmp_path / "web" / "node_modules").symlink_to(modules)
    run(npm, "run", "build", cwd=tmp_path / "web")
    built = {path.name: path.read_bytes() for path in (tmp_path / "built").iterdir()}
    assert built == {path.name: path.read_bytes() for path in BUILT.iterdir()}

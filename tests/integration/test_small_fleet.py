"""Actors whose restarts are spent, as real processes: they rest, and come back."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from scripts.runs.fleet_log import read_fleet_log

pytestmark = pytest.mark.slow

SECONDS = 120.0
FLEET = {"restarts": 2, "restarts_window_s": 6.0, "first_pause_s": 0.05, "start_deadline_s": 5.0}


class Lived:
    """A run of `tests.integration.small_fleet`: what each process came to, and what was said."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.said = folder, ""
        command = [sys.executable, "-m", "tests.integration.small_fleet"]
        self.process = subprocess.Popen(
            [*command, str(folder), json.dumps(FLEET)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def events(self, name: str) -> list[str]:
        """What has happened to a process, in order."""
        return [each["event"] for each in read_fleet_log(self._folder) if each["name"] == name]

    def wait(self, name: str, found: Callable[[list[str]], bool]) -> None:
        """Wait until this is so of a process's events."""
        end = time.monotonic() + SECONDS
        while not found(self.events(name)):
            if self.process.poll() is not None or time.monotonic() > end:
                self.finish()
                pytest.fail(f"{name}: {self.events(name)}\n{self.said}")
            time.sleep(0.1)

    def finish(self) -> None:
        """Have it end, and take what it said; twice is harmless."""
        (self._folder / "over").touch()
        try:
            said, _ = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its guardian ends the others
            said, _ = self.process.communicate()
        self.said = self.said or " ".join(said.split())


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """A run of which actor-0 fails, and fails again after its first rest, and actor-1 hangs until
    it has rested; actor-2 waits for others longer than a start may take.
    """
    folder = tmp_path_factory.mktemp("small")
    for name, does in (("actor-0", "fails"), ("actor-1", "hangs"), ("actor-2", "waits")):
        (folder / name).write_text(does)
    run = Lived(folder)
    run.wait("actor-0", lambda events: events.count("resting") >= 2)
    (folder / "actor-0").unlink()
    run.wait("actor-1", lambda events: "resting" in events)
    (folder / "actor-1").unlink()
    for name in ("actor-0", "actor-1"):
        run.wait(name, lambda events: events[-1] == "ready")
    run.finish()
    return run


def test_an_actor_that_ends_again_and_again_rests_while_the_run_goes_on(lived: Lived) -> None:
    again = ["ended", "restarting", "started"]
    rest = ["ended", "resting", "started"]
    rests = lived.events("actor-0").count("resting")
    assert rests >= 2, "it tries once each time"
    assert lived.events("actor-0") == ["started", *again, *again, *rest * rests, "ready"]
    assert lived.events("learner") == ["started", "ready"] and lived.process.returncode == 0
    assert re.search("fleet.restarts = 2 .* it rests for .* the run goes on with [12]", lived.said)
    assert lived.said.endswith("completed")


def test_a_start_that_hangs_is_ended_twice_and_rests_while_the_run_goes_on(lived: Lived) -> None:
    ended = ["started", "ended", "restarting", "started", "ended", "resting", "started", "ready"]
    assert lived.events("actor-1") == ended
    hung = "actor-1 was not ready within 5 s (fleet.start_deadline_s)"
    assert lived.said.count(f"{hung}: it is ended") == 2
    assert "its last 2 starts hung: it rests for 6 s, and the run goes on with" in lived.said
    assert lived.events("actor-2") == ["started"], "who waits for others does not hang"

"""Processes are killed while a run goes on: they come back, it goes on, and its books close."""

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from scripts.runs.books import Audit
from scripts.runs.fleet_log import read_fleet_log
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

RUN = [
    "learner.total_steps=500",
    "learner.eval_every=10",
    "learner.checkpoint_every=4",
    "questions.eval_limit=20",
    "replay.groups_per_step=4",
    "fleet.first_pause_s=0.1",
]


def wait_for(run: Run, event: str, name: str, count: int, deadline_s: float) -> None:
    """Wait until `name` has had so many of these events."""
    end = time.monotonic() + deadline_s
    while True:
        found = [e for e in read_fleet_log(run.run_dir) if (e["event"], e["name"]) == (event, name)]
        if len(found) >= count:
            return
        if run.process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"{name} was not {event}:\n{''.join(run.lines)}{run.logs()}")
        time.sleep(0.1)


VICTIMS = ("actor-1", "engine", "replay", "learner", "retrieval_server")


@pytest.mark.timeout(1500)
def test_a_run_outlives_the_death_of_each_kind(launch: Callable[..., Run]) -> None:
    run = launch(*RUN)
    run.wait_for("step    2/", 300)
    for victim in VICTIMS:
        name = "actor-0" if victim == "engine" else victim
        words = f"--actor-id {name}" if name.startswith("actor") else f"{name}.worker"
        os.kill(run.engine_of(name) if victim == "engine" else run.pid_of(words), signal.SIGKILL)
        wait_for(run, "ready", name, 2, 300)
    done = max(int(line.split()[1].split("/")[0]) for line in run.lines if line.startswith("step "))
    run.wait_for(f"step {done + 5:>4}/", 300)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(180) == 130, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["steps"] > 4
    restarted = [each["name"] for each in summary["restarts"]]
    assert restarted == ["actor-0" if victim == "engine" else victim for victim in VICTIMS]
    books = Audit()
    books.fold(run.run_dir / "events.log")
    assert books.faults == [] and books.committed > 0
    assert run.leftovers(10.0) == []

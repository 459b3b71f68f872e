"""The fleet shrinks; then one more actor joins by replay's endpoint alone, works and leaves."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from replay.log.event_log import read_whole
from replay.log.records import ActorLeft, Delivered, Leased, LeaseReturned, Record, Superseded
from scripts.runs.books import Audit
from tests.children import ends_with_us
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.soak("fleet")]

RUN = [
    "learner.total_steps=2000",
    "learner.eval_every=50",
    "learner.checkpoint_every=4",
    "questions.eval_limit=20",
    "replay.groups_per_step=4",
]
NAME = "helper"
ENDS = Delivered | Superseded | LeaseReturned


def free_endpoints(count: int) -> list[str]:
    """tcp:// endpoints on free ports of the loopback, all different; none that connections or Ray
    are given by themselves before these are bound, many seconds later.
    """
    found: list[str] = []
    ports = random.SystemRandom().sample(range(20_000, 32_000), 1000)
    while len(found) < count:
        port = ports.pop()
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(f"tcp://127.0.0.1:{port}")
    return found


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """join(endpoint, keys): one more actor, started by hand; its log is `helper.log`."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str, keys: Path) -> subprocess.Popen[bytes]:
        words = ["--connect", endpoint, "--keys", str(keys), "--actor-id", NAME]
        with (tmp_path / "helper.log").open("wb") as log:
            command = [sys.executable, "-m", "actors.worker", *words]
            env = ends_with_us()
            begun.append(subprocess.Popen(command, cwd=tmp_path, stderr=log, env=env))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()


def wait_for_record(
    run: Run, what: str, wanted: Callable[[Record], bool], deadline_s: float
) -> None:
    """Wait until the event log holds a record like this."""
    end = time.monotonic() + deadline_s
    while not any(wanted(record) for record in read_whole(run.run_dir / "events.log")):
        if run.process.poll() is not None or time.monotonic() > end:
            helper = (run.run_dir.parent / "helper.log").read_text(errors="replace")
            pytest.fail(f"{what}:\n{helper}\n{''.join(run.lines)}{run.logs()}")
        time.sleep(0.5)


@pytest.mark.timeout(1500)
def test_the_fleet_shrinks_and_an_actor_joins_by_hand_and_leaves(
    launch: Callable[..., Run], join: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    replay, sync = free_endpoints(2)
    run = launch(*RUN, f"replay.endpoint={replay}", f"weight_sync.endpoint={sync}")
    run.wait_for("step    1/", 300)
    shrink = [sys.executable, "-m", "scripts.cli", "scale", str(run.run_dir), "1"]
    subprocess.run(shrink, cwd=REPOSITORY, check=True, timeout=60)
    run.wait_for("actor-1 has left", 120)
    keys = shutil.copytree(run.run_dir / "keys", tmp_path / "copied")
    actor = join(replay, keys)

    def delivers(record: Record) -> bool:
        return isinstance(record, Delivered) and record.actor_id == NAME

    wait_for_record(run, "the helper delivered nothing", delivers, 400)
    actor.send_signal(signal.SIGTERM)
    assert actor.wait(120) == 0, (tmp_path / "helper.log").read_text()
    assert "drained: SIGTERM" in (tmp_path / "helper.log").read_text()
    done = max(int(line.split()[1].split("/")[0]) for line in run.lines if line.startswith("step "))
    run.wait_for(f"step {done + 3:>4}/", 240)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(180) == 130, "".join(run.lines) + run.logs()
    check_log(run.run_dir)
    assert run.leftovers(10.0) == []


def check_log(run_dir: Path) -> None:
    """Both left in order, what the helper was leased is accounted for, and the books close."""
    records = list(read_whole(run_dir / "events.log"))
    left = {each.actor_id: each.cause for each in records if isinstance(each, ActorLeft)}
    assert left[NAME] == left["actor-1"] == "goodbye"
    own = [each for each in records if getattr(each, "actor_id", "") == NAME]
    leased = {(e.group_id, s) for e in own if isinstance(e, Leased) for s in e.siblings}
    ended = {(e.group_id, e.sibling) for e in own if isinstance(e, ENDS)}
    assert leased and leased == ended
    books = Audit()
    books.fold(run_dir / "events.log")
    assert books.faults == [] and books.committed > 0

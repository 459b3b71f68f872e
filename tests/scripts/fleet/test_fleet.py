"""Hosts that are gone, and Ray as the launcher starts it."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from configs.runtime.process import Exit
from scripts.fleet import fleet, guardian, local_ray, place
from scripts.fleet.fleet import Fleet, Member
from scripts.fleet.host import FleetError
from scripts.fleet.place import NodeGone, Seat


def gone(error: type[Exception]) -> Any:
    def answer(*_: object) -> None:
        raise error("4 workers were killed: the node is low on memory")

    return answer


class Waiting:
    """A host whose worker runs; `ended`: the answers to `wait` that Ray has."""

    poll = ready_at = stopped = None

    def __init__(self) -> None:
        self.asked, self.ended = 0, list[Any]()
        self.wait = SimpleNamespace(remote=self._ask)

    def _ask(self) -> "Waiting":
        self.asked += 1
        return self

    def look(self, references: list["Waiting"], timeout: float) -> tuple[list[Any], list[Any]]:
        return list(self.ended), references


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Member:
    host: Any = Waiting()
    monkeypatch.setattr(ray, "wait", host.look)
    return Member("replay", host, (1, 0.0, 0), tmp_path / "replay.log", [], Seat(tmp_path))


@pytest.mark.parametrize("error", [ray.exceptions.OutOfMemoryError, ray.exceptions.RaySystemError])
def test_a_host_that_ray_has_ended_is_a_killed_process(
    error: type[Exception], member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_answer", gone(error))
    monkeypatch.setattr(ray, "get", gone(error))
    member.host.ended.append(member.host)
    assert member.poll() == -9
    assert (member.ready_at(), member.stopped(), member.host_lives()) == (None, [], False)


def test_a_host_is_asked_once_how_its_process_ends(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_answer", gone(AssertionError))
    monkeypatch.setattr(ray, "get", lambda _: 5)
    assert [member.poll() for _ in range(3)] == [None] * 3
    member.host.ended.append(member.host)
    assert (member.poll(), member.poll(), member.host.asked) == (5, 5, 1)


def test_a_host_that_does_not_answer_is_named(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_answer", gone(ray.exceptions.GetTimeoutError))
    with pytest.raises(FleetError, match="the host of replay did not answer in 30"):
        member.stopped()


def test_all_have_a_seat_before_any_is_placed_and_servers_have_theirs_first(tmp_path: Path) -> None:
    asked: list[str] = []
    put: list[str] = []

    def seat(name: str) -> Seat:
        asked.append(name)
        if name == "actor-1":
            raise NodeGone("node b is gone")
        return Seat(tmp_path)

    place: Any = SimpleNamespace(beside=lambda _: {"retrieval_server-b": ["serve"]}, seat=seat)
    started: Any = Fleet(tmp_path, tmp_path, {}, place)
    started._put = lambda name, *_: put.append(name)
    with pytest.raises(NodeGone):
        started.start({"actor-0": ["act"], "actor-1": ["act"]})
    assert asked == ["retrieval_server-b", "actor-0", "actor-1"] and put == []


STALLED = """
import ctypes, sys, time
from pathlib import Path
from scripts.fleet import fleet, place
locked = bool(sys.argv[2:])
sleep = ctypes.PyDLL(None).sleep if locked else time.sleep  # the former holds the lock
place.start_ray, place.RAY_DEADLINE_S = lambda *_: sleep(60), 0.5
place.LOCKED_S = 0.5 if locked else 60.0
fleet.Fleet(Path(sys.argv[1]), Path(sys.argv[1]), {}).__enter__()
"""


def test_a_start_of_ray_that_does_not_end_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STALLED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == Exit.FAILED
    assert "the launcher has been in phase 'starting Ray' for more than 0.5 s" in done.stderr
    assert done.stderr.endswith(": run the same command again\n")


@pytest.mark.slow
def test_a_start_of_ray_that_holds_the_interpreter_ends_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STALLED, str(tmp_path), "locked"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == Exit.FAILED
    assert "Timeout" in done.stderr and "in _start_ray" in done.stderr


def test_ray_kills_no_host_for_what_its_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(guardian, "start", lambda *_: None)
    monkeypatch.delenv(local_ray.MONITOR, raising=False)
    monkeypatch.setattr(
        place, "start_ray", lambda *_: seen.append(os.environ.get(local_ray.MONITOR))
    )
    for name in (guardian.TOKEN, "SPT_NOENV", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "before")
    Fleet(tmp_path, tmp_path, {}).__enter__()
    assert seen == ["0"]


@pytest.mark.slow
def test_ray_starts_nothing_that_a_run_has_no_use_for_and_listens_on_the_loopback() -> None:
    code = """
import os, psutil, secrets, sys, time
from pathlib import Path
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
from scripts.fleet.local_ray import start_ray
start_ray(2, Path(sys.argv[1]))
import ray
pid_of = ray.remote(num_cpus=0)(lambda: os.getpid())
placed = ray.get(pid_of.remote()) != os.getpid()
while not list(Path(sys.argv[1]).rglob("metrics_export_port*")):
    time.sleep(0.05)  # its agent is there
for each in (psutil.Process(), *psutil.Process().children(recursive=True)):
    listening = [c.laddr.ip for c in each.net_connections() if c.status == "LISTEN"]
    print(each.name(), *each.cmdline()[-1:], *(f"listens:{ip}" for ip in listening))
print(*(f"metrics:{p.read_text()}" for p in Path(sys.argv[1]).rglob("metrics_export_port*")))
print(placed)
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets lie in it: a short path
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *started, placed = done.stdout.splitlines()
    assert placed == "True" and any("raylet" in line for line in started)
    for unused in ("dashboard.py", "monitor.py"):
        assert unused not in done.stdout
    listening = set(re.findall(r"listens:(\S+)", done.stdout))
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1"}, done.stdout
    assert set(re.findall(r"metrics:(\S+)", done.stdout)) == {"-1"}


@pytest.mark.slow
def test_what_hosts_are_asked_each_second_takes_no_memory_of_ray() -> None:
    code = """
import re, sys
from pathlib import Path
import psutil
from scripts.fleet.fleet import Fleet
folder = Path(sys.argv[1])
with Fleet(folder, folder, {}) as fleet:
    fleet.start({"replay": [sys.executable, "-c", "import time; time.sleep(600)"]})
    started = psutil.Process().children(recursive=True)
    (head,) = [each for each in started if each.name() == "gcs_server"]
    for _ in range(3):
        for _ in range(1000):
            fleet.members["replay"].stopped()
        status = Path(f"/proc/{head.pid}/status").read_text()
        print(re.search(r"RssAnon:\\s+(\\d+)", status)[1])
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    first, *_, last = map(int, done.stdout.split())
    assert last - first < 2000 * 2, done.stdout  # kB: of each call that is kept Ray takes 4

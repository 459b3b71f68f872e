"""The benchmarks' harness: children that end with their block, goals, digests of code."""

from pathlib import Path

import psutil
import pytest

from scripts.bench.harness import (
    Processes,
    RunFailed,
    at_least,
    at_most,
    digest_of,
    goals_table,
    median_ratio,
    sources,
)

SLEEPS = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_child_and_what_it_started_are_gone_when_its_block_is_left(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("sleeper", "-c", SLEEPS)
        log = tmp_path / "sleeper.log"
        processes.wait([], 60.0, lambda: log.read_text().endswith("\n"))
        pids = [int(pid) for pid in log.read_text().split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(("command", "code"), [("exit(3)", 3), ("print('x'); exit(1)", 1)])
def test_a_child_that_fails_tells_its_exit_code(tmp_path: Path, command: str, code: int) -> None:
    with Processes(tmp_path) as processes, pytest.raises(RunFailed, match="child ended") as failed:
        processes.run("child", "-c", command, limit_s=60.0)
    assert failed.value.code == code


def test_a_child_that_falls_silent_is_named(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes, pytest.raises(RunFailed, match=r"waited 0.1 s for") as e:
        processes.run("child", "-c", "import time; time.sleep(600)", limit_s=0.1)
    assert e.value.code is None


def test_goals_are_kept_at_their_limits_too() -> None:
    assert at_least(2.0).met(2.0) and not at_least(2.0).met(1.9)
    assert at_most(2.0).met(2.0) and not at_most(2.0).met(2.1)
    assert (str(at_least(0.95)), str(at_most(5))) == ("≥ 0.95", "≤ 5")
    table = goals_table({"a": 1.0, "b": None}, {"a": at_least(2), "b": at_most(3)})
    assert table.row_count == 1


def test_a_ratio_is_that_of_pairs() -> None:
    ours, theirs = [{"s": 1.0}, {"s": 9.0}, {"s": 2.0}], [{"s": 2.0}, {"s": 3.0}, {"s": 2.0}]
    assert median_ratio(ours, theirs, "s") == 1.0


def test_the_code_of_a_package_is_all_its_files(tmp_path: Path) -> None:
    found = sources("replay", "scripts.bench.harness")
    assert {path.name for path in found} >= {"__init__.py", "server.py"}
    with pytest.raises(ModuleNotFoundError, match=r"replay\.none"):
        sources("replay.none")
    (tmp_path / "a").write_text("1")
    before = digest_of([tmp_path / "a"])
    (tmp_path / "a").write_text("2")
    assert digest_of([tmp_path / "a"]) != before

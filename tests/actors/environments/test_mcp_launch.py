"""Processes of MCP servers: which they are, their end by force, and what is left of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.environments.mcp_launch import Launch

SLEEPER = f"{sys.executable} -c 'print(1, flush=True); import time; time.sleep(600)'"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir())


def started(launch: Launch) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(launch.command(), stdout=subprocess.PIPE, start_new_session=True)


def test_a_servers_process_is_known_and_killed() -> None:
    launch = Launch(SLEEPER)
    with started(launch) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        launch.settle()
        launch.kill()
        assert process.wait(30) == -9
    launch.kill()
    launch.close()


def test_a_server_that_is_killed_before_it_began_never_begins() -> None:
    launch = Launch(SLEEPER)
    command = launch.command()
    launch.kill()
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.communicate(timeout=30)[0] == b"" and process.returncode == 1


def test_a_process_that_took_a_dead_servers_number_is_let_live() -> None:
    command = "setsid sleep 600 >/dev/null & echo $!"
    stranger = int(subprocess.check_output(["sh", "-c", command], timeout=30))
    launch = Launch("true")
    launch._pid = stranger  # of a group of its own, and no child of ours
    try:
        launch.kill()
        os.kill(stranger, 0)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_a_program_that_is_not_there_leaves_nothing() -> None:
    launch = Launch("/nowhere/kelu")
    with pytest.raises(FileNotFoundError, match="there is no program '/nowhere/kelu'"):
        launch.command()
    launch.close()

"""An outpost lays what a node's processes read, and leaves nothing of the run on the node."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from scripts.fleet import guardian
from scripts.fleet.host import TAIL_BYTES
from scripts.fleet.outpost import Laid, Outpost
from tests.scripts.fleet.test_guardian import sleeper


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20.0
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def test_what_is_laid_is_there_and_goes_with_the_outpost(tmp_path: Path) -> None:
    token, sockets = f"outpost-{time.time_ns()}", tmp_path / "sockets"
    earlier = sleeper(token)
    files = [
        Laid(str(tmp_path / "run" / "config.yaml"), b"a: 1\n"),
    ]
    outpost = Outpost("127.0.0.1")
    outpost.lay(token, str(sockets), [str(tmp_path / "run" / "logs")], files)
    outpost.entrust(str(sockets / "keys"), {"secret": b"s"})
    assert earlier.wait(20.0) == -9  # of an outpost before, which was cut off
    assert (tmp_path / "run" / "logs").is_dir() and stat.S_IMODE(sockets.stat().st_mode) == 0o700
    secret = sockets / "keys" / "secret"
    assert secret.read_bytes() == b"s" and stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    own, other = sleeper(token), sleeper(f"{token}-other")
    outpost.close()
    assert own.wait(20.0) == -9 and not sockets.exists() and other.poll() is None
    assert (tmp_path / "run" / "config.yaml").exists()
    other.kill()
    other.wait()


def test_a_node_holds_the_secrets_that_it_is_entrusted_with_and_no_others(tmp_path: Path) -> None:
    outpost, keys = Outpost("127.0.0.1"), tmp_path / "keys"
    outpost.entrust(str(keys), {"token": b"t", "actor.key_secret": b"c"})
    outpost.entrust(str(keys), {"token": b"u"})
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == {"token": b"u"}
    assert stat.S_IMODE((keys / "token").stat().st_mode) == 0o600
    outpost.entrust(str(keys), {})
    assert list(keys.iterdir()) == [] and stat.S_IMODE(keys.stat().st_mode) == 0o700


def test_a_log_s_end_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\nafter\n")
    assert Outpost("127.0.0.1").tail(str(log), 7) == "after\n"


def test_of_a_long_log_the_end_is_told_and_how_much_is_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 33)  # a hole: more than any memory holds
        file.seek(0, os.SEEK_END)
        file.write(b"the cause\n")
    first, *_, last = Outpost("127.0.0.1").tail(str(log), 7).splitlines()
    assert first == f"[{(1 << 33) + 10 - 7 - TAIL_BYTES} bytes before this are left out]"
    assert last.endswith("the cause") and len(last) == TAIL_BYTES - 1
    assert Outpost("127.0.0.1").tail(str(log), 1 << 33) == "the cause\n"


def test_an_outpost_that_dies_takes_the_run_s_processes_along(tmp_path: Path) -> None:
    token = f"outpost-{time.time_ns()}"
    watcher = guardian.start(token, tmp_path / "sockets", detached=True)
    own = sleeper(token)
    assert watcher.wait(20.0) == 0  # it lives on as nobody's child
    assert own.poll() is None and watcher.stdin is not None
    watcher.stdin.close()
    assert own.wait(20.0) == -9

"""The guardian of a run: when the launcher is gone, however it went, ends every process of the run.

It waits, without a deadline, for end-of-file on stdin: the launcher's end of the pipe closes when
that exits, is killed or crashes. Processes are found by the `FORAGE_RUN` token in their
environment, which every descendant inherits, orphans too (Ray's agents, an engine child that is
still importing).
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from configs.runtime.process import PID_FILE as PID_FILE
from configs.runtime.process import start_child

TOKEN = "FORAGE_RUN"
SWEEPS = 100  # in at least ten seconds: on a busy machine even the killed need time to end


DETACHED = "detached"


def start(token: str, directory: Path, detached: bool = False) -> subprocess.Popen[bytes]:
    """Start the guardian of the run `token`; it lives until our end of its pipe closes. `detached`:
    as nobody's child, for Ray ends the children of its workers with them.
    """
    return start_child(
        ["-m", "scripts.fleet.guardian", token, str(directory), *[DETACHED] * detached],
        environment={TOKEN: ""},  # a launcher that runs inside another run hands that one's on
        stdin=subprocess.PIPE,
        own_session=True,
        outlives_us=True,
    )


def members(token: str) -> list[int]:
    """The pids of this user's processes that carry the token."""
    mark = f"{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # ended meanwhile, or another user's
            if mark in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def sweep(token: str) -> None:
    """SIGKILL every member until none is left, for `SWEEPS` rounds at most."""
    for _ in range(SWEEPS):
        pids = members(token)
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def launcher_of(directory: Path) -> int | None:
    """The pid that the run's launcher wrote into its directory, if there is one."""
    try:
        return int((directory / PID_FILE).read_text())
    except (OSError, ValueError):
        return None


def lives(pid: int, directory: Path) -> bool:
    """True while the launcher that wrote its pid there runs: a later process may have that pid."""
    try:
        process = psutil.Process(pid)
        older = process.create_time() <= (directory / PID_FILE).stat().st_mtime + 1.0
        return bool(older and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, OSError):
        return False


def wait_gone(directory: Path, deadline_s: float) -> int | None:
    """Wait until no guardian looks after this directory; return one that still does."""
    end = time.monotonic() + deadline_s
    while (pid := _guardian_of(directory)) is not None and time.monotonic() < end:
        time.sleep(0.1)
    return pid


def _guardian_of(directory: Path) -> int | None:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "scripts.fleet.guardian" in words and str(directory) in words:
            return int(process.pid)
    return None


def main() -> None:
    """Wait for the launcher's end, sweep, remove the run's socket directory."""
    token, directory, *detached = sys.argv[1:]
    if detached and os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(token)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Processes that tests start end with the process that runs the tests, however that ends.

Those that ask the kernel for it (`ends_with_us`) end at once. `look_after` sees to all the others,
whoever started them: run as a script, `python children.py TOKEN`, this file kills whoever carries
`MARK=TOKEN` in its environment, once the process that started it has closed its standard input or
is gone.
"""

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "FORAGE_TESTS"
SWEEPS = 100  # in at least ten seconds: on a busy machine even the killed need time to end
LEFT_ALONE = b"guardian"  # ends by itself once its launcher has, and clears up after it


def ends_with_us(**more: str) -> dict[str, str]:
    """The environment of a process that ends with this one, which must be its parent: for programs
    that heed `FORAGE_PARENT` (`configs.runtime.process.begin`). They do not hand it on.
    """
    return os.environ | {"FORAGE_PARENT": str(os.getpid())} | more


def look_after() -> "subprocess.Popen[bytes]":
    """Mark whatever this process starts from now on, and start what kills that once our end of its
    standard input is closed.
    """
    token = os.environ[MARK] = uuid.uuid4().hex
    os.environ["SPT_NOENV"] = "1"  # else vLLM's engines overwrite the mark with their titles
    return subprocess.Popen(
        [sys.executable, "-I", __file__, token],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != MARK},
    )


def carrying(mark: str) -> dict[int, bytes]:
    """The command lines of those who carry `NAME=value` in their environment, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # ended meanwhile, or another user's
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found


def main() -> None:
    """Wait for the end of standard input or of our parent, then kill until nobody is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1.0)[0]:
        pass  # a fork of our parent's holds its end of the pipe too
    for _ in range(SWEEPS):
        family = carrying(f"{MARK}={sys.argv[1]}")
        pids = [pid for pid, line in family.items() if LEFT_ALONE not in line]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()

"""Commands of ours as processes of their own: their memory is given back when they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from configs.runtime.process import Exit
from configs.runtime.signals import Interrupt
from scripts.wiki.packages import WikiError

POLL_S = 0.1
DRAIN_S = 900.0  # of a command that was interrupted: an update under way, then its checkpoint
# Drained; ended before its handler stood; killed after the patience.
_ENDED = (Exit.INTERRUPTED, -signal.SIGTERM, -signal.SIGKILL)
# Of a command's words; what it prints goes to the file, or is shown where there is none.
Run = Callable[[Sequence[str], Path | None], None]


class OutOfTime(Exception):
    """A command was ended in order because its time was over; the same one goes on."""


def forage(
    words: Sequence[str],
    log: Path | None,
    is_over: Callable[[], bool] = lambda: False,
    patience_s: float = DRAIN_S,
) -> None:
    """Run a command; what it prints goes to the end of `log`, or, without one, to standard error,
    where progress and errors always go.

    Ctrl-C and SIGTERM have it end in order, once, and so does its time when it `is_over`; then it
    is killed after `patience_s`, or, after Ctrl-C or SIGTERM, `DRAIN_S`. Raises WikiError,
    KeyboardInterrupt and OutOfTime.
    """
    command = [sys.executable, "-m", "scripts.cli", *words]
    told = os.environ | {"FORAGE_PARENT": str(os.getpid())}
    kept = log.open("ab") if log else nullcontext(sys.stderr)
    with kept as out, Interrupt(polled=True) as interrupt:
        # A group of its own: a terminal's Ctrl-C is ours, and passed on.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, env=told, process_group=0
        )
        try:
            code, ended_by_us = _wait(process, interrupt, is_over, patience_s)
        finally:
            process.kill()
            process.wait()
    if interrupt.cause:
        raise KeyboardInterrupt(f"interrupted by {interrupt.cause}")
    if ended_by_us and code in _ENDED:
        raise OutOfTime(f"forage {words[0]}")
    if code != Exit.DONE:
        also = f", and {log}" if log else ""
        raise WikiError(
            f"forage {words[0]} ended with exit code {code}: see above{also}; once that is mended, "
            "the same command goes on"
        )


def _wait(
    process: "subprocess.Popen[bytes]",
    interrupt: Interrupt,
    is_over: Callable[[], bool],
    patience_s: float,
) -> tuple[int, bool]:
    """The exit code, and whether the process was told to end."""
    told, kill_s = False, 0.0
    while True:
        try:
            return process.wait(POLL_S), told
        except subprocess.TimeoutExpired:
            if not told and (interrupt.cause or is_over()):
                process.terminate()
                told = True
                kill_s = time.monotonic() + (DRAIN_S if interrupt.cause else patience_s)
            elif told and time.monotonic() > kill_s:
                process.kill()

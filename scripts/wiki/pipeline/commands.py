"""Commands of ours as processes of their own: their memory is given back when they end."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.runtime.process import Exit
from configs.runtime.signals import Interrupt
from scripts.wiki.packages import WikiError

POLL_S = 0.1


def forage(words: Sequence[str], log: Path) -> None:
    """Run a command; its tables go to the end of `log`, progress and errors to standard error.

    Ctrl-C and SIGTERM have it end in order, once. Raises WikiError, and KeyboardInterrupt.
    """
    command = [sys.executable, "-m", "scripts.cli", *words]
    told = os.environ | {"FORAGE_PARENT": str(os.getpid())}
    with log.open("ab") as out, Interrupt(polled=True) as interrupt:
        # A group of its own: a terminal's Ctrl-C is ours, and passed on.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, env=told, process_group=0
        )
        try:
            code = _wait(process, interrupt)
        finally:
            process.kill()
            process.wait()
    if interrupt.cause:
        raise KeyboardInterrupt(f"interrupted by {interrupt.cause}")
    if code != Exit.DONE:
        raise WikiError(
            f"forage {words[0]} ended with exit code {code}: see above, and {log}; once that is "
            "mended, the same command goes on"
        )


def _wait(process: "subprocess.Popen[bytes]", interrupt: Interrupt) -> int:
    told = False
    while True:
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if interrupt.cause and not told:
                process.terminate()
                told = True

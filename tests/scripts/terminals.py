"""A terminal for tests: a pseudo-terminal of some columns."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

from configs.runtime.process import REPOSITORY


def run_in_terminal(
    words: Sequence[str], out: Path | None = None, columns: int = 80
) -> tuple[int, str]:
    """Run python with these words in a terminal; its exit code, and what the terminal was told.
    Standard output goes there too, or to the file `out`.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    said = bytearray()
    with (out or Path(os.devnull)).open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env=environment,
            stdin=theirs,
            stdout=file if out else theirs,
            stderr=theirs,
        )
    os.close(theirs)
    reader = threading.Thread(target=_read, args=(ours, said))
    reader.start()
    code = process.wait()
    reader.join()
    os.close(ours)
    return code, said.decode(errors="replace")


def _read(file: int, said: bytearray) -> None:
    try:
        while piece := os.read(file, 4096):
            said += piece
    except OSError:  # the other end is closed
        return

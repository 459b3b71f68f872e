"""A terminal for tests: a pseudo-terminal of some columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.cells import cell_len

from configs.runtime.process import REPOSITORY


def run_in_terminal(
    words: Sequence[str],
    out: Path | None = None,
    columns: int = 80,
    rows: int = 40,
    term: str = "xterm-256color",
) -> tuple[int, str]:
    """Run python with these words in a terminal; its exit code, and what the terminal was told.
    Standard output goes there too, or to the file `out`.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": term}
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


_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|(.)", re.DOTALL)


class Screen:
    """What a terminal shows: `lines` are its rows, and before them those that have left it above.
    Of its commands it knows those that rich gives.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[list[str]] = [[]]
        self._y = self._x = 0

    def feed(self, said: str) -> None:
        """Obey."""
        for number, command, letter in (match.groups() for match in _SEQUENCE.finditer(said)):
            if letter:
                self._letter(letter)
            else:
                self._command(command, int(number) if number and number.isdigit() else 1)

    def _letter(self, letter: str) -> None:
        width = cell_len(letter)
        if letter == "\n" or (letter != "\r" and self._x + width > self.columns):
            self._y, self._x = self._y + 1, 0 if letter != "\n" else self._x
            self.lines += [[]] * (self._y == len(self.lines))
        if letter == "\r":
            self._x = 0
        elif letter != "\n":
            line = self.lines[self._y]
            line = line + [" "] * (self._x - len(line))
            self.lines[self._y] = line[: self._x] + [letter] + [""] * (width - 1)
            self._x += width

    def _command(self, command: str, count: int) -> None:
        top = max(0, len(self.lines) - self.rows)
        if command == "A":
            self._y = max(top, self._y - count)
        elif command == "H":
            self._y, self._x = top, 0
        elif command == "J":
            self.lines[top:] = [[] for _ in self.lines[top:]]
        elif command == "K":
            self.lines[self._y] = []


def screen(said: str, columns: int, rows: int = 40) -> list[str]:
    """The lines of a terminal of this size that was told so."""
    shown = Screen(columns, rows)
    shown.feed(said)
    return ["".join(line).rstrip() for line in shown.lines]


def recording(shown: list[str]) -> Callable[[str], AbstractContextManager[None]]:
    """A `status` that shows nothing, and notes what it would."""

    def status(text: str) -> AbstractContextManager[None]:
        shown.append(text)
        return nullcontext()

    return status


def told_by_command(*words: str) -> tuple[list[str], list[str]]:
    """What a command of ours that ends well writes without a terminal: the lines of its standard
    output, and of its standard error all but those on what is under way.
    """
    command = [sys.executable, "-m", "scripts.cli", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    said = done.stderr.splitlines()
    return done.stdout.splitlines(), [e for e in said if not re.search(r" \(\d+ s\)$", e)]

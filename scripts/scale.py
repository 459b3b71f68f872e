"""`python scripts/scale.py RUN N`: have so many actors from now on, while the run goes on.

Consumes the launcher's pid in the run's socket directory; produces `<run_dir>/actors.wanted`, which
the launcher looks at: it starts `actor-0` to `actor-(N-1)` where they are missing, and has the
others drain and leave. Waits for nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.process import socket_dir
from scripts import guardian

FILE_NAME = "actors.wanted"


class Wanted:
    """The launcher's side: tells each change once."""

    def __init__(self, run_dir: Path) -> None:
        """What an earlier launch was asked for is forgotten."""
        self._path = run_dir / FILE_NAME
        self._path.unlink(missing_ok=True)
        self._last = ""

    def change(self) -> int | None:
        """How many actors are wanted, if that is news."""
        try:
            text = self._path.read_text()
        except OSError:
            return None
        if text == self._last:
            return None
        self._last = text
        return int(text)


def ask(run_dir: Path, count: int) -> None:
    """Ask the run's launcher for so many actors. Raises ValueError when none runs, or for a count
    below 1.
    """
    if count < 1:
        raise ValueError(f"N = {count!r}: at least 1; to end the run, press Ctrl-C there")
    directory = socket_dir(str(run_dir))
    pid = guardian.launcher_of(directory)
    if pid is None or not guardian.lives(pid, directory):
        raise ValueError(f"RUN = {str(run_dir)!r}: no launcher runs it: start it, or go on with it")
    draft = run_dir / f"{FILE_NAME}.tmp"
    draft.write_text(str(count))
    draft.replace(run_dir / FILE_NAME)


def main(words: Sequence[str] | None = None) -> int:
    """Ask; exit code 2 with a message when nobody can be asked."""
    parser = argparse.ArgumentParser(description="Change the number of a run's actors.")
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("count", metavar="N", type=int)
    arguments = parser.parse_args(words)
    try:
        ask(arguments.run, arguments.count)
    except ValueError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.run}: {arguments.count} actors wanted; its launcher says what it does")
    return 0


if __name__ == "__main__":
    sys.exit(main())

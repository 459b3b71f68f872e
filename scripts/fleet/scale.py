"""The number of a run's actors, changed while the run goes on.

`<run_dir>/actors.wanted` holds it. The launcher looks at the file: it starts `actor-0` to
`actor-(N-1)` where they are missing, and has the others drain and leave.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from configs.load import ConfigError
from configs.runtime.files import write_durably
from configs.runtime.process import socket_dir
from scripts.command.options import argument
from scripts.fleet import guardian
from scripts.setup.resolve import run_directory

FILE_NAME = "actors.wanted"
MOST_ACTORS = 10_000
MOST_BYTES = 64  # of the file
logger = logging.getLogger(__name__)


class Wanted:
    """The launcher's side: tells each change once."""

    def __init__(self, run_dir: Path) -> None:
        """Forget the number that an earlier launch was asked for."""
        self._path = run_dir / FILE_NAME
        self._path.unlink(missing_ok=True)
        self._last = b""

    def change(self) -> int | None:
        """Return the number of actors wanted, if that is news; what is no number is told once, in
        the log, and changes nothing.
        """
        try:
            with self._path.open("rb") as file:
                text = file.read(MOST_BYTES).strip()
        except OSError:
            return None
        if text == self._last:
            return None
        self._last = text
        if text.isdigit() and 1 <= int(text) <= MOST_ACTORS:
            return int(text)
        logger.warning(
            "%s holds %r: 1 to %d actors, as `forage scale` writes it",
            self._path,
            text.decode(errors="replace"),
            MOST_ACTORS,
        )
        return None


@dataclass(frozen=True)
class ScaleOptions:
    run: Path = argument("the directory of a run that goes on")
    count: int = argument("how many actors it is to have", metavar="N")

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"N = {self.count!r}: at least 1; to end the run, press Ctrl-C there")
        if self.count > MOST_ACTORS:
            raise ConfigError(f"N = {self.count!r}: at most {MOST_ACTORS}: give fewer")


def scale(options: ScaleOptions) -> None:
    """Ask the run's launcher for so many actors. Raises ConfigError when none runs."""
    directory = socket_dir(str(run_directory(options.run)))
    pid = guardian.launcher_of(directory)
    if pid is None or not guardian.lives(pid, directory):
        raise ConfigError(
            f"RUN = {str(options.run)!r}: no launcher runs it: start it, or go on with it "
            f"(forage resume {options.run} [--trust])"
        )
    write_durably(options.run / FILE_NAME, str(options.count).encode())
    print(f"{options.run}: {options.count} actors wanted; its launcher says what it does")

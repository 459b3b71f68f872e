"""The number of a run's actors, changed while the run goes on.

`<run_dir>/actors.wanted` holds it. The launcher looks at the file: it starts `actor-0` to
`actor-(N-1)` where they are missing, and has the others drain and leave.
"""

from dataclasses import dataclass
from pathlib import Path

from configs.load import ConfigError
from configs.runtime.files import write_durably
from configs.runtime.process import socket_dir
from scripts.fleet import guardian
from scripts.options import argument
from scripts.setup.resolve import run_directory

FILE_NAME = "actors.wanted"


class Wanted:
    """The launcher's side: tells each change once."""

    def __init__(self, run_dir: Path) -> None:
        """Forget the number that an earlier launch was asked for."""
        self._path = run_dir / FILE_NAME
        self._path.unlink(missing_ok=True)
        self._last = ""

    def change(self) -> int | None:
        """Return the number of actors wanted, if that is news."""
        try:
            text = self._path.read_text()
        except OSError:
            return None
        if text == self._last:
            return None
        self._last = text
        return int(text)


@dataclass(frozen=True)
class ScaleOptions:
    run: Path = argument("the directory of a run that goes on")
    count: int = argument("how many actors it is to have", metavar="N")

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"N = {self.count!r}: at least 1; to end the run, press Ctrl-C there")


def scale(options: ScaleOptions) -> None:
    """Ask the run's launcher for so many actors. Raises ConfigError when none runs."""
    directory = socket_dir(str(run_directory(options.run)))
    pid = guardian.launcher_of(directory)
    if pid is None or not guardian.lives(pid, directory):
        raise ConfigError(
            f"RUN = {str(options.run)!r}: no launcher runs it: start it, or go on with it "
            f"(forage resume {options.run})"
        )
    write_durably(options.run / FILE_NAME, str(options.count).encode())
    print(f"{options.run}: {options.count} actors wanted; its launcher says what it does")

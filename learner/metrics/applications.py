"""Which actor took up which version of the weights, and when: `<run_dir>/versions.jsonl`.

A line for each time that an actor has said so: an array of the learner's time in seconds since the
epoch, the actor, the version, and how many seconds the actor received its bytes while it went on
writing, and then had its rollouts pause. It is no part of the record: where it cannot be written,
or is gone, nothing else lacks.
"""

import logging
import time
from pathlib import Path

import msgspec

from configs.runtime.files import decoded, latest_s, lines_since
from weight_sync.protocol import Applied

FILE_NAME = "versions.jsonl"
_log = logging.getLogger(__name__)


class Application(msgspec.Struct, frozen=True, array_like=True):
    """A line of the file."""

    at_s: float
    actor: str
    version: int
    receive_s: float
    pause_s: float

    @property
    def is_sound(self) -> bool:
        """True where its times are such as there can be, from the epoch to now."""
        lasted = (self.receive_s, self.pause_s)
        return min(lasted) >= 0 and sum(lasted) <= self.at_s <= latest_s()


class Applications:
    """The file of a run: written by its learner, read on by whoever looks."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / FILE_NAME
        self._offset = 0
        self._warned = False

    def note(self, said: Applied) -> None:
        """Append what an actor has said; of one thread."""
        seconds = said.receive_s, said.generation_pause_s
        line = Application(time.time(), said.actor_id, said.policy_version, *seconds)
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:  # a full disk: the run may outlive it
            if not self._warned:
                _log.warning("%s: not written any more: %s", self._path, error)
            self._warned = True

    def news(self) -> list[Application]:
        """Return lines that have come since, not all of very many; what is none is left out."""
        lines, self._offset = lines_since(self._path, self._offset)
        found = (decoded(line, Application) for line in lines)
        return [each for each in found if each and each.is_sound]

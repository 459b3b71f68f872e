"""`<run_dir>/fleet.jsonl`: the life of each process of a run, one line an event.

Lines of `{"at_s", "event", "name", ...}`, `at_s` in seconds since the epoch. Events: `started`
(pid), `ready`, `ended` (code, cause), `restarting` and `resting` (cause, pause_s), `stopped`,
`continued`.
"""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from configs.runtime.files import decoded, latest_s, lines_since

FILE_NAME = "fleet.jsonl"
_log = logging.getLogger(__name__)


class FleetLog:
    """Appends; `write` may be called from one thread."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME

    def write(self, event: str, name: str, at_s: float | None = None, **facts: object) -> None:
        """One line; `at_s` is now unless given."""
        line = {
            "at_s": time.time() if at_s is None else at_s,
            "event": event,
            "name": name,
            **facts,
        }
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk: the run may outlive it
            _log.warning("%s: %s is not on record: %s", self._path, line, error)


def read_fleet_log(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Every event so far; none where the launcher has written none."""
    path = run_dir / FILE_NAME
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


class Restarting(msgspec.Struct, frozen=True, tag_field="event", tag="restarting"):
    """A line that says that a process is started again."""

    at_s: float
    name: str
    cause: str = ""


class RestartsSince:
    """Reads on which processes of a run were started again, while the launcher writes."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._offset = run_dir / FILE_NAME, 0

    def news(self) -> list[Restarting]:
        """Return the restarts since, not all of very many; what is no such line is left out."""
        lines, self._offset = lines_since(self._path, self._offset)
        found = (decoded(line, Restarting) for line in lines)
        latest = latest_s()
        return [each for each in found if each and 0 <= each.at_s <= latest]


def restarts(run_dir: Path) -> list[dict[str, str]]:
    """The restarts of all launches of the run: of which process, and why."""
    events = [line for line in read_fleet_log(run_dir) if line["event"] == "restarting"]
    return [{"name": line["name"], "cause": line["cause"]} for line in events]

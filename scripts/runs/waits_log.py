"""`<run_dir>/waits.jsonl`: what each actor waited for, and what its engine did, change by change.

The launcher appends to it while it watches the run; the format is in docs/records.md. It is no part
of the record, and where it cannot be written nothing else lacks.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from configs.runtime.files import decoded, latest_s, lines_since
from replay.protocol import Status
from scripts.runs.waits_file import HELD, MOST_ACTORS, QUEUED, ROOM, VERSION

FILE_NAME = "waits.jsonl"
MOST_BYTES = 64 << 20  # of the file
EVERY_S = 1.0
AT_ONCE = 8  # lines of a look
BEAT_S = 10.0  # the longest without a line
LAPSE_S = 20.0  # without a line: what it said before holds no longer
MOST_AT_ONCE = 1 << 17  # bytes that are read
MOST = 1_000_000  # of a number
RUNNING, KV_USE, PUBLISHED = "actor/running_requests", "actor/kv_use_max", "sync/published"
Numbers = tuple[int | None, ...]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_log = logging.getLogger(__name__)


class ActorSample(msgspec.Struct, frozen=True, array_like=True):
    """A line: an actor's places that wait for a lease, whether it waits for a newer version, its
    engine's requests that run, and that wait, and the use of its cache in percent. None: not told.
    With no actor nothing has changed; with an empty name nothing is known of any.
    """

    at_s: Annotated[float, msgspec.Meta(ge=0)]
    actor: str | None = None
    free: _Count | None = None
    behind: _Count | None = None
    running: _Count | None = None
    queued: _Count | None = None
    kv: _Count | None = None

    def values(self) -> tuple[str | int | None, ...]:
        """Return all but the time."""
        return self.actor, self.free, self.behind, self.running, self.queued, self.kv


class WaitsLog:
    """Appends to the file of a run; of one thread."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._said: dict[str, tuple[float, Numbers]] = {}  # by actor: when, and what
        self._looked_s = self._wrote_s = 0.0
        self._newest = -1.0  # version that was published
        self._torn = True  # for all that is known: the last line
        self._full = self._warned = False

    def tell(self, status: Status, states: Mapping[str, str]) -> None:
        """Write what has changed, if it is time; `states`: what keeps a process from its work."""
        for report in status.steps:
            self._newest = report.gauges.get(PUBLISHED, self._newest)
        now = round(time.time(), 3)
        if self._full or 0 <= now - self._looked_s < EVERY_S:
            return
        self._looked_s = now
        lines: list[list[Any]] = []
        if not 0 <= now - self._wrote_s <= LAPSE_S:
            self._said.clear()
            lines.append([now, ""])
        lines += self._changed(now, status, states)
        if lines or now - self._wrote_s >= BEAT_S:
            self._append(now, lines or [[now]])

    def end(self) -> None:
        """Say that nothing is known from here on."""
        if self._wrote_s and not self._full:
            now = round(time.time(), 3)
            self._append(now, [[now, ""]])

    def _changed(
        self, now: float, status: Status, states: Mapping[str, str]
    ) -> Iterable[list[Any]]:
        """Yield a line of each actor that is not as it was last said, of a few at once."""
        named = sorted(status.fleet, key=lambda name: (len(name), name))[:MOST_ACTORS]
        found: dict[str, Numbers] = dict.fromkeys(self._said, ())  # of whom nothing is heard
        found |= {name: self._numbers(status, name) for name in named if name not in states}
        changed = [name for name, each in found.items() if each != self._of(name)[1]]
        for name in sorted(changed, key=lambda name: self._of(name)[0])[:AT_ONCE]:
            numbers = found[name]
            yield [now, name, *numbers]
            self._said[name] = now, numbers
            if not numbers:
                del self._said[name]

    def _of(self, name: str) -> tuple[float, Numbers]:
        return self._said.get(name, (0.0, ()))

    def _numbers(self, status: Status, name: str) -> Numbers:
        gauges = status.fleet[name]
        room, held, version = (gauges.get(each, -1.0) for each in (ROOM, HELD, VERSION))
        # Leases come no more once the run is to end.
        free = None if ROOM not in gauges else 0 if status.stop_cause else _whole(room - held)
        behind = int(0 <= version < self._newest)
        if RUNNING not in gauges:
            return () if free is None else (free, behind)
        use = 100 * gauges.get(KV_USE, 0.0)
        return free, behind, *(_whole(n) for n in (gauges[RUNNING], gauges.get(QUEUED, 0.0), use))

    def _append(self, now: float, lines: list[list[Any]]) -> None:
        self._wrote_s = now
        text = b"".join(msgspec.json.encode(each) + b"\n" for each in lines)
        try:
            with self._path.open("ab") as file:
                size = file.tell()
                if size + len(text) >= MOST_BYTES:
                    self._full = True
                    _log.warning("%s: full at %d bytes: not written any more", self._path, size)
                    text = msgspec.json.encode([now, ""]) + b"\n" if size < MOST_BYTES else b""
                file.write(b"\n" * (self._torn and size > 0) + text)
            self._torn = False
        except OSError as error:  # a full disk: the run may outlive it
            self._torn, self._wrote_s = True, 0.0  # all is told anew once it can be
            if not self._warned:
                _log.warning("%s: not written: %s", self._path, error)
            self._warned = True


class SamplesSince:
    """Reads the file of a run on, while the launcher writes."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._offset = run_dir / FILE_NAME, 0

    def news(self) -> list[ActorSample]:
        """Return lines that have come since, not all of very many; what is none is left out."""
        lines, self._offset = lines_since(self._path, self._offset, MOST_AT_ONCE)
        found = (decoded(line, ActorSample) for line in lines)
        latest = latest_s()
        return [each for each in found if each and each.at_s <= latest]


def _whole(value: float) -> int:
    """A number of a gauge; 0 of one that is none."""
    return round(value) if 0 <= value <= MOST else 0

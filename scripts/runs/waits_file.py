"""`<run_dir>/waits.json`: how a run stands right now, for whoever looks at it from outside.

The launcher replaces it once a second while it watches the run, and removes it at the end. It is no
part of the record, and where it cannot be written nothing else lacks.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from configs.runtime.files import decoded, replacing
from replay.protocol import Status

FILE_NAME = "waits.json"
EVERY_S = 1.0
MOST_ACTORS = 256
MOST_BYTES = 1 << 20  # that are read
# gauges of an actor
HELD, ROOM, QUEUED = "actor/rollouts_in_flight", "actor/capacity", "actor/queued_requests"
SEARCHES, VERSION, PACE = "retrieval/in_flight", "sync/policy_version", "actor/tokens_per_s"
_KEPT = (HELD, ROOM, QUEUED, SEARCHES, VERSION, PACE)


class Snapshot(msgspec.Struct, frozen=True):
    """The file: when it was written, what replay does or waits for, train groups that are ready and
    open, why processes do not work, and numbers of actors, of so many as it names.
    """

    at_s: float
    phase: str
    ready: float
    open: float
    states: dict[str, str]
    fleet: dict[str, dict[str, float]]
    actors: int


class WaitsFile:
    """Writes the file of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._told_s = 0.0

    def tell(self, status: Status, states: Mapping[str, str]) -> None:
        """Replace it, if it is time."""
        if time.monotonic() < self._told_s + EVERY_S:
            return
        self._told_s = time.monotonic()
        named = sorted(status.fleet, key=lambda name: (len(name), name))[:MOST_ACTORS]
        snapshot = Snapshot(
            at_s=time.time(),
            phase=status.phase,
            ready=status.gauges.get("replay/ready_groups", 0.0),
            open=status.gauges.get("replay/open_groups", 0.0),
            states=dict(states),
            fleet={name: _picked(status.fleet[name]) for name in named},
            actors=len(status.fleet),
        )
        # A full disk: the run may outlive it.
        with suppress(OSError), replacing(self._path, durable=False) as draft:
            draft.write_bytes(msgspec.json.encode(snapshot))

    def remove(self) -> None:
        """Remove it."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_snapshot(run_dir: Path) -> Snapshot | None:
    """The file of a run; None where there is none, or no such one."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return decoded(file.read(MOST_BYTES), Snapshot)
    except OSError:
        return None


def _picked(gauges: Mapping[str, float]) -> dict[str, float]:
    return {name: gauges[name] for name in _KEPT if name in gauges}

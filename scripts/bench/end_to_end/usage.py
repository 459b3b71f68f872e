"""The processor time of the processes of a cell, and for how long each had something to do.

A main thread that runs, or waits for a core, has something to do; one that sleeps is idle. So on
two cores an engine that has to share is not taken for an idle one (Linux only: schedstat).
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil  # type: ignore[import-untyped]

EVERY_S = 0.5
ROLES = {  # by words of a command line
    "EngineCore": "engine",
    "learner.worker": "learner",
    "actors.worker": "actor",
    "replay.worker": "replay",
    "end_to_end.worker": "driver",  # launcher of the fleet, or learner and rollouts in one
    "overlap.server": "retrieval",
}
OTHER = "other"


class Seen(NamedTuple):
    """What a process had used at a moment; `active_s` of its main thread."""

    at_s: float
    cpu_s: float
    active_s: float


def role_of(line: str) -> str:
    """The role of a process by its command line."""
    return next((role for words, role in ROLES.items() if words in line), OTHER)


class Usage:
    """Looks at a process and all below it, and at `others`, at most every `EVERY_S`."""

    def __init__(
        self, root: int, others: tuple[int, ...] = (), now: Callable[[], float] = time.time
    ) -> None:
        self._root, self._others, self._now = root, others, now
        self._looked_s = 0.0
        self._role: dict[int, str] = {}
        self.seen: dict[str, dict[int, list[Seen]]] = defaultdict(dict)

    def look(self) -> None:
        """Look, if it is time to."""
        if self._now() - self._looked_s < EVERY_S:
            return
        self._looked_s = self._now()
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._root)
            others = [psutil.Process(pid) for pid in self._others]
            for process in (root, *root.children(recursive=True), *others):
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    self._note(process)

    def _note(self, process: psutil.Process) -> None:
        used = process.cpu_times()
        schedule = Path(f"/proc/{process.pid}/schedstat").read_text(encoding="ascii").split()
        active_s = (int(schedule[0]) + int(schedule[1])) / 1e9
        looks = self._looks_of(process.pid, " ".join(process.cmdline()))
        looks.append(Seen(self._now(), used.user + used.system, active_s))

    def _looks_of(self, pid: int, line: str) -> list[Seen]:
        """The looks at a process, all under its latest role: its command line is its parent's
        before it has begun, and empty while it ends.
        """
        known = self._role.get(pid, OTHER)
        role = role_of(line) if line else known
        looks = self.seen[known].pop(pid, [])
        self._role[pid], self.seen[role][pid] = role, looks
        return looks

    def cpu_s(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Processor seconds by role."""
        return {role: sum(_used(self.seen[role], begin_s, end_s, 1)) for role in self.seen}

    def idle(self, role: str, begin_s: float, end_s: float) -> float | None:
        """The share of the time in which these had nothing to do, on average; None of nobody."""
        active = _used(self.seen.get(role, {}), begin_s, end_s, 2)
        if not active:
            return None
        return max(0.0, 1.0 - sum(active) / len(active) / (end_s - begin_s))


def _used(seen: Mapping[int, list[Seen]], begin_s: float, end_s: float, which: int) -> list[float]:
    """What each process that was there all the time used of `which` column."""
    found = []
    for looks in seen.values():
        if looks[0].at_s - EVERY_S <= begin_s and looks[-1].at_s >= end_s - 2 * EVERY_S:
            at_s, used = [look.at_s for look in looks], [look[which] for look in looks]
            first, last = np.interp([begin_s, end_s], at_s, used)
            found.append(float(last - first))
    return found

"""The memory and the descriptors of a run's processes, looked at again and again.

A run's processes are those that carry a mark in their environment (`tests.children.carrying`).
What of them grows is reckoned over a stretch of time, of those that live through all of it, from
its first tenth to its last. Memory is what only the process can give back, swapped or not; pages of
files, which the kernel takes and brings as it likes, do not count. It is judged where a process
holds least in a tenth: a learner holds tens of megabytes more in the middle of a step, so that its
median tells at which moments it was looked at.
"""

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

from scripts.runs.fleet_log import read_fleet_log
from tests.children import carrying

TENTHS = 10
LAUNCHER, ENGINE = "launcher", "engine"
_HELD = ("RssAnon", "RssShmem", "VmSwap")  # of /proc/PID/status
_NO_ENGINE = "resource_tracker"  # beside an engine, an actor has this child


class Sample(NamedTuple):
    """What one process held at a time, in seconds since the epoch."""

    at_s: float
    held: int
    descriptors: int


@dataclass(frozen=True)
class Stretch:
    """From when to when growth counts, in seconds since the epoch."""

    begin_s: float
    end_s: float

    def tenth(self, at_s: float) -> int:
        """In which of its tenths a time is; of another time, none of them."""
        share = (at_s - self.begin_s) / (self.end_s - self.begin_s)
        return min(int(share * TENTHS), TENTHS - 1) if 0.0 <= share <= 1.0 else -1


@dataclass(frozen=True)
class Growth:
    """What a process held over a stretch: in each tenth the median of its memory, the least of it,
    and the median of its descriptors.
    """

    name: str
    pid: int
    held: tuple[int, ...]
    least: tuple[int, ...]
    descriptors: tuple[int, ...]

    @property
    def rise(self) -> float:
        """Of its memory from the first tenth to the last, in parts of what it was."""
        return self.least[-1] / self.least[0] - 1.0

    @property
    def median_rise(self) -> float:
        """The same of the medians."""
        return self.held[-1] / self.held[0] - 1.0

    @property
    def more(self) -> int:
        """Bytes of memory that it holds more in the last tenth than in the first."""
        return self.least[-1] - self.least[0]

    @property
    def further(self) -> int:
        """How many more descriptors it has in the last tenth."""
        return self.descriptors[-1] - self.descriptors[0]


def growth(name: str, pid: int, samples: Sequence[Sample], over: Stretch) -> Growth | None:
    """What became of a process over a stretch; None of one that was not there at its begin or at
    its end.
    """
    tenths: dict[int, list[Sample]] = {}
    for sample in samples:
        tenths.setdefault(over.tenth(sample.at_s), []).append(sample)
    if not {0, TENTHS - 1} <= tenths.keys():
        return None
    inside = [tenths[tenth] for tenth in range(TENTHS) if tenth in tenths]
    held = (int(statistics.median(s.held for s in each)) for each in inside)
    least = (min(s.held for s in each) for each in inside)
    files = (int(statistics.median_low(s.descriptors for s in each)) for each in inside)
    return Growth(name, pid, tuple(held), tuple(least), tuple(files))


class Census:
    """Of the processes that carry `mark`; `launcher` is the pid of the first of them."""

    def __init__(self, mark: str, run_dir: Path, launcher: int) -> None:
        self._mark, self._run_dir, self._launcher = mark, run_dir, launcher
        self._names: dict[tuple[int, float], str] = {}  # by pid and when it began
        self._samples: dict[tuple[int, float], list[Sample]] = {}

    def look(self, now_s: float) -> None:
        """Take down what each of them holds now."""
        members = self._members()
        for pid, command in carrying(self._mark).items():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                each = pid, process.create_time()
                if each not in self._names:
                    self._names[each] = name_of(pid, command, process.ppid(), members)
                sample = Sample(now_s, held_by(pid), process.num_fds())
                self._samples.setdefault(each, []).append(sample)

    def _members(self) -> dict[int, str]:
        """The names of the launcher and of what it has started, by pid."""
        found = {
            int(event["pid"]): str(event["name"])
            for event in read_fleet_log(self._run_dir)
            if event["event"] == "started"
        }
        return found | {self._launcher: LAUNCHER}

    def over(self, stretch: Stretch) -> list[Growth]:
        """What became of each process that was there all the time, by name."""
        found = (
            growth(self._names[each], each[0], samples, stretch)
            for each, samples in self._samples.items()
        )
        return sorted((g for g in found if g is not None), key=lambda g: (g.name, g.pid))


def held_by(pid: int) -> int:
    """Bytes of memory that a process has, without pages of files. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return sum(int(told.get(name, "0 kB").split()[0]) for name in _HELD) << 10


def name_of(pid: int, command: bytes, parent: int, members: Mapping[int, str]) -> str:
    """What to call a process: a member of the run by its name, an actor's engine by the actor's,
    another by its program.
    """
    if pid in members:
        return members[pid]
    program = _program(command.replace(b"\0", b" ").decode(errors="replace").split())
    if parent not in members or members[parent] == LAUNCHER:
        return program
    if members[parent].startswith("actor-") and _NO_ENGINE not in command.decode(errors="replace"):
        return f"{members[parent]}: {ENGINE}"
    return f"{members[parent]}: {program}"


def _program(words: Iterable[str]) -> str:
    """A program's own name: of Python's, the module or the file that it runs."""
    names = [word.rpartition("/")[2] for word in words]
    for name in names[1:] if names and names[0].startswith("python") else names:
        if name and not name.startswith("-"):
            return name
    return names[0] if names else "?"

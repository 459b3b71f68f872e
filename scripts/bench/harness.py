"""The harness of the benchmarks: options, child processes, kept rows, goals and printed figures.

A benchmark is a plan, a measurement and a report. Its child processes and their files live in
folders which the caller removes; they are ended by their ids, every wait has a deadline, and an
error holds the last words of the child that it is about.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple, Self

import numpy as np
import psutil  # type: ignore[import-untyped]
from rich.console import Console, RenderableType
from rich.table import Table

from configs.runtime.files import write_durably
from configs.runtime.process import Exit, end_child, start_child
from scripts.command.options import Options, option

START_S, LEAVE_S, POLL_S = 120.0, 30.0, 0.2
Report = Callable[[str], None]


class BenchError(RuntimeError):
    """A benchmark could not be run; the message says why."""


class RunFailed(BenchError):
    """A child process ended or fell silent; `code` is its exit code, if it ended."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


# ---- options


@dataclass(frozen=True)
class BenchOptions(Options):
    """Options of every benchmark."""

    quick: bool = option("fewer and shorter measurements", default=False)
    json: Path | None = option("where to write the figures", metavar="FILE")


# ---- child processes


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with TemporaryDirectory(prefix="forage-bench-") as name:
        yield Path(name)


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A folder in shared memory that is gone afterwards, however the children end that use it."""
    with TemporaryDirectory(prefix="forage-bench-", dir="/dev/shm") as name:
        yield Path(name)


class Processes:
    """Child processes by name; they and what they have started are gone when the block is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._cpu: dict[str, list[tuple[float, float]]] = {}  # time, processor seconds
        self.peak_rss_bytes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            family = _family(process.pid)
            end_child(process, patience_s=0.0)
            for each in family:  # an engine does not end with a server that is killed
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(family, LEAVE_S)

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Start `python COMMAND`; its output goes to `NAME.log`."""
        log = self._folder / f"{name}.log"
        log.unlink(missing_ok=True)
        self._running[name] = start_child(command, log=log, environment=env)

    def pid(self, name: str) -> int:
        """The process id of a child that was started and not yet waited for."""
        return self._running[name].pid

    def run(self, name: str, *command: str, limit_s: float) -> None:
        """Start `python COMMAND` and wait for its end. Raises RunFailed."""
        self.start(name, *command)
        self.wait([name], limit_s, lambda: False)

    def wait(self, names: list[str], limit_s: float, until: Callable[[], bool]) -> None:
        """Wait for `until()` or the end of these. Raises RunFailed for other ends, or late."""
        end_s = time.monotonic() + limit_s
        while not until() and not (names and all(self._ended(name) for name in names)):
            for name in self._running:
                if self._ended(name) and name not in names:
                    raise RunFailed(f"{name} ended too early: {self._last_words(name)}", Exit.DONE)
            if time.monotonic() > end_s:
                words = "; ".join(f"{name}: {self._last_words(name)}" for name in self._running)
                raise RunFailed(f"waited {limit_s:g} s for {names or 'the server'}: {words}")
            self._look()
            time.sleep(POLL_S)
        for name in names:
            self._running.pop(name)

    def cpu_share(self, name: str, begin_s: float, end_s: float) -> float:
        """Of one core, over this time."""
        at_s, used_s = np.array(self._cpu[name]).T
        used = np.interp([begin_s, end_s], at_s, used_s)
        return float(used[1] - used[0]) / (end_s - begin_s)

    def _look(self) -> None:
        for name, process in self._running.items():
            with contextlib.suppress(psutil.NoSuchProcess, OSError, StopIteration):
                used = psutil.Process(process.pid).cpu_times()
                self._cpu.setdefault(name, []).append((time.monotonic(), used.user + used.system))
                self.peak_rss_bytes[name] = status_bytes("VmHWM", process.pid)

    def _ended(self, name: str) -> bool:
        code = self._running[name].poll()
        if code:
            raise RunFailed(f"{name} ended with {code}: {self._last_words(name)}", code)
        return code is not None

    def _last_words(self, name: str) -> str:
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return " | ".join(text.splitlines()[-6:]) or "(it said nothing)"


def _family(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def status_bytes(name: str, pid: int | None = None) -> int:
    """A size of a process: VmRSS is its resident set, VmHWM the peak. Raises OSError."""
    lines = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


# ---- figures that a run goes on with


class Rows:
    """Finished rows, each a file of `folder`; rows of anything else than `of` are measured anew."""

    def __init__(self, folder: Path, of: str) -> None:
        self._folder, self._of = folder, of
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: Any, measure: Callable[[], Any]) -> Any:
        """The row on file for `key` (anything JSON), else the result of `measure`, then kept."""
        path = self._path(key)
        if not path.exists():
            write_durably(path, json.dumps(measure()).encode())
        return json.loads(path.read_text(encoding="utf-8"))

    def kept(self, key: Any) -> Any:
        """The row on file for `key`, or None."""
        path = self._path(key)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _path(self, key: Any) -> Path:
        text = json.dumps([self._of, key], sort_keys=True)
        return self._folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"

    def forget(self) -> None:
        """Remove every row: the next run begins anew."""
        for path in self._folder.glob("*.json"):
            path.unlink()


def sources(*modules: str) -> list[Path]:
    """The files of these modules; of a package every Python file. Raises ModuleNotFoundError."""
    found: set[Path] = set()
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module {name!r}", name=name)
        path = Path(spec.origin)
        found.update(path.parent.rglob("*.py") if spec.submodule_search_locations else [path])
    return sorted(found)


def digest_of(paths: Iterable[Path]) -> str:
    """A digest of these files' names and contents."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# ---- goals and reports


class Goal(NamedTuple):
    """A limit that a figure keeps to."""

    limit: float
    more_is_better: bool

    def met(self, value: float) -> bool:
        """Return True if the value is on the good side of the limit, or at it."""
        return value >= self.limit if self.more_is_better else value <= self.limit

    def verdict(self, value: float) -> str:
        """The word for a table."""
        return "met" if self.met(value) else "[bold red]missed[/]"

    def __str__(self) -> str:
        return f"{'≥' if self.more_is_better else '≤'} {self.limit:g}"


def at_least(limit: float) -> Goal:
    """A goal where more is better."""
    return Goal(limit, more_is_better=True)


def at_most(limit: float) -> Goal:
    """A goal where less is better."""
    return Goal(limit, more_is_better=False)


def goals_table(
    found: Mapping[str, Any],
    goals: Mapping[str, Goal],
    names: Iterable[str] | None = None,
    title: str | None = None,
) -> Table:
    """The named figures (those with a goal by default) beside their goals; None is left out."""
    table = Table("measured", "value", "goal", "", title=title)
    for name in goals if names is None else names:
        if (value := found[name]) is not None:
            goal = goals.get(name)
            told = (str(goal), goal.verdict(value)) if goal else ("", "")
            table.add_row(name, f"{value:.3g}", *told)
    return table


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By the names of the first row: the median over all rows."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def median_ratio(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], name: str
) -> float:
    """The median over pairs of rows that were measured side by side."""
    return statistics.median(a[name] / b[name] for a, b in zip(ours, theirs, strict=True))


def machine() -> dict[str, Any]:
    """The processor, how many cores this process may use, and how busy they are just now."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(": ")[2] for line in info if line.startswith("model name")]
    return {
        "processor": (names or [platform.machine()])[0],
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def reporter(file: IO[str] | None = None) -> Report:
    """A function that prints a line to stderr or `file`, after the seconds since now."""
    notes, start_s = Console(stderr=True, file=file), time.monotonic()

    def report(text: str) -> None:
        notes.print(f"{time.monotonic() - start_s:5.0f} s  {text}")

    return report


def present(tables: Iterable[RenderableType], width: int = 110) -> None:
    """Print tables; `width` is for an output that is no terminal."""
    Console(width=None if sys.stdout.isatty() else width).print(*tables)


def finish(
    options: BenchOptions,
    found: Mapping[str, Any],
    tables: Iterable[RenderableType],
    width: int = 110,
) -> None:
    """Print the tables, and write the figures where a file is named."""
    present(tables, width)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

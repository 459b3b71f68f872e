"""The cells as they are run: one child process each, kept once it is measured."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from scripts.bench.end_to_end import plan
from scripts.bench.end_to_end.figures import Row, figures, learning, row_of
from scripts.bench.end_to_end.plan import Cell
from scripts.bench.end_to_end.record import Job, Parts, Record
from scripts.bench.end_to_end.task import DEMO, Task, TaskFiles
from scripts.bench.end_to_end.usage import Usage
from scripts.bench.harness import BenchError, Processes, Report, Rows, in_memory, scratch
from scripts.bench.overlap.server import serving

LIMIT_S = 3600.0  # of one cell, at least
PATIENCE = 4.0  # times as long as it should take
WORKER = "scripts.bench.end_to_end.worker"


class Kept:
    """What has been measured of a plan, kept from one call of the command to the next."""

    def __init__(self, folder: Path, of: str, own: Sequence[str] = (), task: Task = DEMO) -> None:
        """`of`: what is measured; `own`: the overrides of all cells."""
        self._rows = Rows(folder, of)
        self.own, self.task = tuple(own), task
        self._made_of: dict[int, str] = {}

    def made_of(self, seed: int) -> str:
        """What a seed is measured with (`Task.made_of`), as it was when it was first asked for."""
        if seed not in self._made_of:
            self._made_of[seed] = self.task.made_of(seed)
        return self._made_of[seed]

    def parts(self, seed: int, measure: Callable[[], Parts] | None = None) -> Parts | None:
        """Generation and training alone; measured where it can be and was not yet."""
        key = {"parts": seed, **self._of(seed)}
        found = self._found(key, None if measure is None else lambda: plain(measure()))
        return None if found is None else msgspec.convert(found, Parts)

    def row(self, cell: Cell, measure: Callable[[], Row] | None = None) -> Row | None:
        """The row of a cell."""
        key = {"cell": plain(cell), **self._of(cell.seed)}
        found = self._found(key, measure)
        return None if found is None else row_of(cell, found)

    def _of(self, seed: int) -> Row:
        return {"task": self.task.name, "made_of": self.made_of(seed), "overrides": self.own}

    def _found(self, key: Any, measure: Callable[[], Any] | None) -> Any:
        return self._rows.kept(key) if measure is None else self._rows.get(key, measure)


def plain(value: Any) -> Any:
    """A struct as what JSON can hold."""
    return msgspec.to_builtins(value)


class Slice:
    """The time of one call of the command: `fits` tells whether there is room for something."""

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._begun_s, self._limit_s = now, now(), 60.0 * minutes
        self._any = False

    def fits(self, about_s: float) -> bool:
        """True where it would end in time, and for the first thing in any case."""
        in_time = self._now() - self._begun_s + about_s <= self._limit_s
        fits, self._any = in_time or not self._any, True
        return fits


def measure(cells: Sequence[Cell], kept: Kept, minutes: float, report: Report) -> None:
    """Measure what is missing and fits. Raises BenchError, ConfigError."""
    time_left = Slice(minutes)
    for seed in dict.fromkeys(cell.seed for cell in cells):
        missing = [cell for cell in cells if cell.seed == seed and kept.row(cell) is None]
        if not missing and kept.parts(seed):
            continue
        files = kept.task.files(seed, kept.own, report)
        with serving(files.passages, seed) as server:
            stand = Stand(kept.task, files, server, kept.own, report)
            if not _measure_all(seed, missing, kept, stand, time_left):
                return


def _measure_all(
    seed: int, cells: Sequence[Cell], kept: Kept, stand: "Stand", time_left: Slice
) -> bool:
    """Measure a seed's parts and cells; False once there is no time for the next."""
    if kept.parts(seed) is None and not time_left.fits(kept.task.parts_s):
        return False
    parts = kept.parts(seed, partial(stand.parts, seed))
    if parts is None:
        raise BenchError(f"seed {seed}: the parts alone were not measured")
    for cell in cells:
        if not time_left.fits(cell.about_s):
            return False
        kept.row(cell, partial(stand.cell, cell, parts))
    return True


class Stand:
    """The files and the retrieval server of a seed, to measure cells with."""

    def __init__(
        self,
        task: Task,
        files: TaskFiles,
        server: tuple[str, int],
        own: Sequence[str],
        report: Report,
    ) -> None:
        self._task, self._files, self._server = task, files, server
        self._own, self._report = own, report

    def parts(self, seed: int) -> Parts:
        """Generation and training alone. Raises RunFailed."""
        files, task = self._files, self._task
        about = f"about {task.parts_s / 60:.0f} minutes"
        self._report(f"generation and training alone, seed {seed}: {about}")
        url = f"{self._server[0]}/{plan.AT_ONCE.path}"
        seats = f"actors.max_num_seqs={task.in_flight_alone}"
        same = plan.shared(files, files.settled, seed, url)
        job = Job(
            kind="parts",
            config=str(task.config),
            overrides=(*same, *plan.PACE, seats, *self._own),
            engines=1,
            steps=task.updates,
            learns=False,
            server=self._server,
            in_flight_alone=task.in_flight_alone,
            window=task.window,
        )
        with scratch() as folder:
            self._run(folder, job, task.parts_s)
            return msgspec.json.decode((folder / "record.json").read_bytes(), type=Parts)

    def cell(self, cell: Cell, parts: Parts) -> Row:
        """The figures of a cell. Raises RunFailed."""
        self._report(f"{cell.name}: about {cell.about_s / 60:.0f} minutes")
        latency = plan.latency_of(cell.latency, parts.turn_s)
        url = f"{self._server[0]}/{latency.path}"
        job = Job(
            kind=cell.schedule.kind,
            config=str(self._task.config),
            overrides=cell.overrides(self._files, url, self._own),
            engines=cell.schedule.engines,
            steps=cell.last,
            learns=cell.learns,
            server=self._server,
        )
        with scratch() as folder:
            begun = time.monotonic()
            usage = self._run(folder, job, cell.about_s)
            whole_s = time.monotonic() - begun
            record = msgspec.json.decode((folder / "record.json").read_bytes(), type=Record)
        found = figures(record, usage, cell.uncounted) | {"whole_s": whole_s}
        if cell.learns:
            found |= learning(record)
        self._report(f"  {found['step_s']:.2f} s a step; {whole_s:.0f} s in all")
        return found

    def _run(self, folder: Path, job: Job, about_s: float) -> Usage:
        overrides, out = (*job.overrides, f"run_dir={folder / 'run'}"), str(folder / "record.json")
        with in_memory() as memory, Processes(folder) as processes:
            job = msgspec.structs.replace(job, overrides=overrides, out=out, memory=str(memory))
            processes.start("cell", "-m", WORKER, msgspec.json.encode(job).decode())
            usage = Usage(processes.pid("cell"), (self._server[1],))

            def look() -> bool:
                usage.look()
                return False

            processes.wait(["cell"], max(LIMIT_S, PATIENCE * about_s), look)
        return usage

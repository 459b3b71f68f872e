"""Generation and cells as they are run, each in a child process, and kept once measured."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from scripts.bench.end_to_end.figures import figures
from scripts.bench.end_to_end.plan import AT_ONCE, PACE, shared
from scripts.bench.end_to_end.record import Job, Record
from scripts.bench.end_to_end.run import LIMIT_S, Slice
from scripts.bench.end_to_end.run import WORKER as FLEET_WORKER
from scripts.bench.end_to_end.task import TaskFiles
from scripts.bench.end_to_end.usage import Usage
from scripts.bench.harness import Processes, Report, Rows, scratch
from scripts.bench.overlap.server import serving
from scripts.bench.plan.cells import (
    CONFIG,
    LAYERS,
    ROLLOUTS,
    SEED,
    Cell,
    ModelName,
    fitted_cells,
)
from scripts.bench.plan.record import Generation, GenerationJob

WORKER = "scripts.bench.plan.worker"
IN_FLIGHT = (8, 32, 96, ROLLOUTS)
ALONE_S: dict[ModelName, float] = {"demo": 60.0, "deep": 120.0}  # about, on two cores
Row = dict[str, Any]


class Kept:
    """What has been measured, kept from one call of the command to the next."""

    def __init__(self, folder: Path, of: str) -> None:
        self._rows = Rows(folder, of)

    def generation(
        self, model: ModelName, measure: Callable[[], Generation] | None = None
    ) -> Generation | None:
        """A model's generation; measured where it can be and was not yet."""
        plain = None if measure is None else lambda: msgspec.to_builtins(measure())
        found = self._found({"generation": model}, plain)
        return None if found is None else msgspec.convert(found, Generation)

    def row(self, cell: Cell, measure: Callable[[], Row] | None = None) -> Row | None:
        """A cell's figures."""
        found: Row | None = self._found({"cell": msgspec.to_builtins(cell)}, measure)
        return found

    def _found(self, key: Any, measure: Callable[[], Any] | None) -> Any:
        return self._rows.kept(key) if measure is None else self._rows.get(key, measure)


class Files:
    """The demo's files and both models, made where they are missing."""

    def __init__(self, report: Report) -> None:
        from scripts.bench.end_to_end.task import DEMO
        from scripts.bench.overlap.task import prepare_model  # late: torch takes seconds

        self.task: TaskFiles = DEMO.files(SEED, (), report)
        self._make = partial(prepare_model, self.task.model, report=report)

    def model(self, name: ModelName) -> Path:
        """The folder of a model."""
        return self._make(layers=LAYERS[name])


def measure(
    cells: Sequence[Cell],
    kept: Kept,
    files: Files,
    time_left: Slice,
    *,
    quick: bool,
    report: Report,
) -> None:
    """Measure what is missing and fits, model by model: its generation, the runs that are
    fitted, the others. Raises BenchError.
    """
    order = in_order(cells, repeats(quick))
    if all(kept.row(cell) is not None for cell in order):
        return  # and so is generation, which comes first
    with serving(files.task.passages, SEED) as server:
        stand = Stand(files, server, quick=quick, report=report)
        for cell in order:
            model = cell.model
            if kept.generation(model) is None:
                if not time_left.fits(ALONE_S[model]):
                    return
                kept.generation(model, partial(stand.generation, model))
            if kept.row(cell) is None:
                if not time_left.fits(cell.about_s):
                    return
                kept.row(cell, partial(stand.cell, cell))


def repeats(quick: bool) -> int:
    """How often the runs are made that are fitted."""
    return 1 if quick else 2


class Stand:
    """The files and the retrieval server to measure with."""

    def __init__(
        self, files: Files, server: tuple[str, int], *, quick: bool, report: Report
    ) -> None:
        self._files, self._server, self._quick, self._report = files, server, quick, report

    def generation(self, model: ModelName) -> Generation:
        """A model's generation. Raises RunFailed."""
        self._report(f"{model}: generation alone, about {ALONE_S[model] / 60:.1f} minutes")
        path, url = self._files.model(model), f"{self._server[0]}/{AT_ONCE.path}"
        same = shared(self._files.task, path, SEED, url)
        with scratch() as folder, Processes(folder) as processes:
            seats = f"actors.max_num_seqs={ROLLOUTS}"
            job = GenerationJob(
                config=str(CONFIG),
                overrides=(*same, *PACE, seats, f"run_dir={folder / 'run'}"),
                server=self._server,
                in_flight=IN_FLIGHT,
                batches=4,
                window=(1.0, 5.0) if self._quick else (2.0, 12.0),
                out=str(folder / "record.json"),
            )
            told = msgspec.json.encode(job).decode()
            processes.run("generation", "-m", WORKER, told, limit_s=LIMIT_S)
            return msgspec.json.decode(Path(job.out).read_bytes(), type=Generation)

    def cell(self, cell: Cell) -> Row:
        """The figures of a run. Raises RunFailed."""
        self._report(f"{cell.name}: about {cell.about_s / 60:.1f} minutes")
        begun = time.monotonic()
        with scratch() as folder:
            found = self._run(cell, folder)
        whole_s = time.monotonic() - begun
        self._report(f"  {found['step_s']:.2f} s a step; {whole_s:.0f} s in all")
        return found | {"whole_s": whole_s}

    def _run(self, cell: Cell, folder: Path) -> Row:
        url = f"{self._server[0]}/{cell.latency.path}"
        overrides = cell.overrides(self._files.task, self._files.model(cell.model), url)
        job = Job(
            kind="async",
            config=str(CONFIG),
            overrides=(*overrides, f"run_dir={folder / 'run'}"),
            engines=cell.actors,
            steps=cell.last,
            learns=False,
            server=self._server,
            out=str(folder / "record.json"),
        )
        with Processes(folder) as processes:
            processes.start("cell", "-m", FLEET_WORKER, msgspec.json.encode(job).decode())
            usage = Usage(processes.pid("cell"), (self._server[1],))

            def look() -> bool:
                usage.look()
                return False

            processes.wait(["cell"], LIMIT_S, look)
        record = msgspec.json.decode((folder / "record.json").read_bytes(), type=Record)
        return figures(record, usage, cell.uncounted)


def in_order(cells: Sequence[Cell], repeats: int) -> list[Cell]:
    """All runs, model by model, those that are fitted before the others, and again after them."""
    found = list[Cell]()
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model]
        first, *others = fits(model, own[0].steps, repeats)
        found += [*first, *own, *(cell for pair in others for cell in pair)]
    return found


def fits(model: ModelName, steps: int, repeats: int) -> list[tuple[Cell, Cell]]:
    """The runs that are fitted, so many times."""
    return [fitted_cells(model, steps, again) for again in range(repeats)]

"""What asynchrony is worth, on one work: `forage bench end-to-end [--quick] [--json FILE]`.

The demo, or the wiki task, is trained by one schedule after the other: lock-step, synchronous with
overlapped searches, one step off, asynchronous; with the same model, questions, groups, steps and
seed, and with searches whose latency goes by their words. Each finished cell is a file in `--out`;
the same command goes on where it was cut off, and `--minutes` ends a slice. Exit code 3: cells are
left.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.load import ConfigError, dump, load, read_override
from configs.runtime.process import REPOSITORY, Exit
from scripts.bench import harness
from scripts.bench.end_to_end import plan
from scripts.bench.end_to_end.figures import Row, summary
from scripts.bench.end_to_end.plan import Cell
from scripts.bench.end_to_end.record import TaskName
from scripts.bench.end_to_end.report import draw, tables
from scripts.bench.end_to_end.run import Kept, measure, plain
from scripts.bench.end_to_end.task import DEMO, LATENCIES, TASKS, WIKI, Task
from scripts.command.options import option, overrides

CODE = (  # of these, and of the task's own, kept cells are figures
    "actors", "learner", "replay", "weight_sync", "retrieval_server", "configs", "scripts.fleet",
    "scripts.setup", "scripts.train_sync", "scripts.bench.overlap", "scripts.bench.harness",
    *(f"scripts.bench.end_to_end.{name}" for name in
      ("figures", "fleet", "loop", "parts", "plan", "record", "run", "task", "usage", "worker")),
)  # fmt: skip
# The ideal, the names of rows and what is compared are reckoned with the cell's.
OF_A_CELL = (
    "seed", "run_dir", "model.path", "questions.train", "questions.eval", "retrieval.url",
    "retrieval.corpus", "retrieval.index", "retrieval.cache_queries", "learner.total_steps",
    "learner.threads", "learner.lr", "learner.lr_schedule", "learner.eval_every", "actors.count",
    "replay.max_staleness", "replay.drop_no_signal",
)  # fmt: skip
METHOD = {
    "tokens_per_s": "tokens that were sampled and trained on in the counted steps, from the end of "
    "the last uncounted step to the end of the last; an asynchronous mode has max_staleness more "
    "uncounted steps, in which what was rolled out before the first is used up",
    "ideal": "of a token: the most of generation by the engines of the asynchronous modes, "
    "training, and the processor time of both over the cores, each measured alone; updates of "
    "weights, replay and waiting are free",
    "policy": "pace: one that has learned to search, and learns no more (wiki: `made_of`); exact "
    "match: the demo's",
    "rivals": "a ratio is over the best of the modes measured of those named; --quick measures "
    "those that whole measurements on two cores had as the best of their latency",
    "search_share": "the mean seconds of a search over those of a turn's generation, as the cell's "
    "rollouts saw both, waits for others included",
    "idle": "learner: not in an update; engines: nothing to run, on average",
    "latency": "drawn by the words of a query: the same words are as late in every mode; tail: "
    "log-normal, p50 200 ms, p99 2 s; scaled: of its shape; its mean, as put in, "
    f"{plan.SEARCH_SHARE:g} of a turn's generation alone: search_share shows what waiting for "
    "processors adds",
    "em_goal_s": "seconds of training to greedy exact match .9; without the evaluations where "
    "training stands still for them, with them where it does not",
    "difference": f"of greedy exact match at the end from that of {plan.BASELINE}, paired by seed",
}


def _by_task(name: str) -> str:
    """A field of every task, for the help."""
    return "; ".join(
        f"{task.name} {', '.join(map(str, getattr(task, name)))}" for task in TASKS.values()
    )


@dataclass(frozen=True)
class BenchEndToEndOptions(harness.BenchOptions):
    """Options of `forage bench end-to-end`."""

    overrides: tuple[str, ...] = overrides()
    task: TaskName = option("the work: the demo, or what make wiki trains", default="demo")
    quick: bool = option("six cells of one seed, of the demo: about ten minutes", default=False)
    modes: tuple[str, ...] = option(
        f"schedules to run: {_by_task('modes')} (default all)", default=(), metavar="NAME"
    )
    latencies: tuple[str, ...] = option(
        f"of searches: {', '.join(LATENCIES)} (default: {_by_task('latencies')})",
        default=(),
        metavar="NAME",
    )
    seeds: tuple[int, ...] = option(
        f"seeds to run (default: {_by_task('seeds')}; quick: 0)", default=(), metavar="N", least=0
    )
    steps: int | None = option(
        f"steps that each pace counts (default: demo {DEMO.steps}, quick {DEMO.quick_steps}; "
        f"wiki {WIKI.steps})",
        metavar="N",
        least=1,
    )
    only: Literal["pace", "em"] | None = option(
        "pace: tokens a second alone; em: whole runs of the demo to exact match alone (default "
        "both; wiki: pace)"
    )
    headline: str = option(
        f"asynchronous mode that the ratios are of (default: demo {DEMO.headline}, wiki "
        f"{WIKI.headline})",
        default="",
        metavar="NAME",
    )
    minutes: float = option(
        "length of a slice: nothing but the first begins that would end later",
        default=30.0,
        least=0,
    )
    out: Path = option(
        "folder that keeps finished measurements", default=REPOSITORY / "runs" / "bench_end_to_end"
    )
    plot: Path | None = option("where to write the plot", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        task = self.of
        ahead = [name for name, mode in task.modes.items() if mode.kind == "async"]
        for flag, given, known in (
            ("--modes", self.modes, list(task.modes)),
            ("--latencies", self.latencies, list(LATENCIES)),
            ("--headline", (self.of_headline,), ahead),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"{flag} {name!r}: one of {', '.join(known)}")
        self._refuse_what_does_nothing()
        load(task.config, self.overrides)
        for name, value in map(read_override, self.overrides):
            if name in OF_A_CELL:
                raise ConfigError(
                    f"{name} = {value!r}: each cell has its own: drop it, and choose by --modes, "
                    "--seeds and --steps"
                )

    @property
    def of(self) -> Task:
        """The task."""
        return TASKS[self.task]

    @property
    def of_headline(self) -> str:
        """The mode that the ratios are of."""
        return self.headline or self.of.headline

    def _refuse_what_does_nothing(self) -> None:
        task = self.of
        if self.quick and not task.quick:
            minutes = (task.parts_s + sum(cell.about_s for cell in self._whole)) / 60
            raise ConfigError(
                f"--quick --task {task.name}: its modes do not fit ten minutes, they take "
                f"{minutes:.0f}: drop --quick, and choose by --modes, --steps and --minutes"
            )
        if self.only == "em" and not task.em_steps:
            raise ConfigError(
                f"--only em --task {task.name}: its exact match is what forage bench wiki measures"
            )
        for flag, what, given in (
            ("--modes", "modes", self.modes),
            ("--latencies", "latencies", self.latencies),
            ("--only", "cells", self.only),
            ("--headline", "modes", self.headline),
        ):
            if self.quick and given:
                raise ConfigError(f"--quick chooses its own {what}: drop {flag}")
        if self.quick and len(self.seeds) > 1:
            raise ConfigError("--quick takes one seed: name one after --seeds")
        if self.only == "em" and self.steps:
            raise ConfigError(f"--only em trains whole runs of {task.em_steps} steps: drop --steps")

    @property
    def cells(self) -> list[Cell]:
        """The cells in the order in which they are measured."""
        task = self.of
        if self.quick:
            seed = self.seeds[0] if self.seeds else 0
            return list(plan.quick_cells(task, seed, self.steps or task.quick_steps))
        return self._whole

    @property
    def _whole(self) -> list[Cell]:
        task = self.of
        return list(
            plan.cells(
                task,
                self.modes or tuple(task.modes),
                self.latencies or task.latencies,
                self.seeds or task.seeds,
                self.steps or task.steps,
                self.only or "all",
            )
        )


def measured_of(options: BenchEndToEndOptions, on: Row) -> str:
    """All that kept cells are figures of: code, packages, machine, configuration."""
    locks = (REPOSITORY / "requirements").glob("*.lock")
    digest = harness.digest_of([*harness.sources(*CODE, *options.of.code), *locks])
    configuration = dump(load(options.of.config, options.overrides))
    return f"{digest} {on['processor']} {on['cores']} {configuration}"


def left(options: BenchEndToEndOptions, kept: Kept) -> Iterator[Cell]:
    """The cells that are not measured."""
    return (cell for cell in options.cells if kept.row(cell) is None)


def what_is_left(options: BenchEndToEndOptions, kept: Kept) -> str:
    """The cells that are not measured, and about how long they and their parts take, in words."""
    cells = list(left(options, kept))
    unmeasured = {cell.seed for cell in cells if kept.parts(cell.seed) is None}
    about_s = len(unmeasured) * options.of.parts_s + sum(cell.about_s for cell in cells)
    return f"{len(cells)} cells left, about {about_s / 60:.0f} minutes, {cells[0].name} first"


def present(options: BenchEndToEndOptions, kept: Kept, on: Row) -> None:
    """Print and write what there is."""
    cells, cores, task = options.cells, on["cores"], options.of
    rows = [row for cell in cells if (row := kept.row(cell)) is not None]
    if not rows:
        return
    seeds = dict.fromkeys(cell.seed for cell in cells)
    parts = {seed: known for seed in seeds if (known := kept.parts(seed)) is not None}
    found = summary(rows, parts, task, options.of_headline, cores)
    made_of = {seed: words for seed in seeds if (words := kept.made_of(seed))}
    where = ", ".join(f"{name} {value}" for name, value in on.items())
    work = "; ".join((f"the {task.name} task", *made_of.values(), f"{len(rows)} cells"))
    title = f"{work}; async_over_… are of {options.of_headline}; {where}"
    remaining = [cell.name for cell in left(options, kept)]
    more = {"rows": rows, "parts": {seed: plain(each) for seed, each in parts.items()}}
    written = found | more | {"task": task.name, "made_of": made_of}
    written |= {"left": remaining, "machine": on, "method": METHOD}
    shown = tables(rows, parts, found, task, title=title, cores=cores)
    harness.finish(options, written, shown, width=190)
    if plot := draw(rows, task, options.plot or options.out / f"{task.name}.png"):
        print(f"plot: {plot}")


def bench(options: BenchEndToEndOptions) -> int:
    """Measure what is missing, then report; 3 when something is left. Raises ConfigError,
    BenchError.
    """
    report, on = harness.reporter(), harness.machine()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the learner's own process has it
    for seed in dict.fromkeys(cell.seed for cell in options.cells):
        options.of.made_of(seed)  # before anything is written, for what it refuses
    kept = Kept(options.out, measured_of(options, on), options.overrides, options.of)
    if any(left(options, kept)):
        report(what_is_left(options, kept))
    failure = None
    try:
        measure(options.cells, kept, options.minutes, report)
    except harness.BenchError as error:  # of one cell: the others are figures all the same
        failure = error
    present(options, kept, on | {"load_after": harness.machine()["load"]})
    if failure:
        raise failure
    if not any(left(options, kept)):
        return Exit.DONE
    print(f"{what_is_left(options, kept)}: give the same command again to go on")
    return Exit.STOPPED

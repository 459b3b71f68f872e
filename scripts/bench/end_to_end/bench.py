"""What asynchrony is worth, on one work: `forage bench end-to-end [--quick] [--json FILE]`.

The demo is trained by one schedule after the other: lock-step, synchronous with overlapped
searches, one step off, asynchronous; with the same model, questions, groups, steps and seed, and
with searches whose latency goes by their words. Each finished cell is a file in `--out`; the same
command goes on where it was cut off, and `--minutes` ends a slice. Exit code 3: cells are left.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.load import ConfigError, load
from configs.runtime.process import REPOSITORY, Exit
from scripts.bench import harness
from scripts.bench.end_to_end import plan
from scripts.bench.end_to_end.figures import Row, summary
from scripts.bench.end_to_end.plan import HEADLINE, LATENCIES, MODES, Cell
from scripts.bench.end_to_end.report import draw, tables
from scripts.bench.end_to_end.run import Kept, measure, plain
from scripts.demo.errors import ColdStartFailed
from scripts.options import option, overrides

CODE = (  # of these, kept cells are figures
    "actors", "learner", "replay", "weight_sync", "retrieval_server", "configs", "scripts.fleet",
    "scripts.train_sync", "scripts.demo", "scripts.bench.overlap",
    *(f"scripts.bench.end_to_end.{name}" for name in
      ("fleet", "loop", "parts", "plan", "record", "run", "usage", "worker")),
)  # fmt: skip
QUICK_STEPS, STEPS, SEEDS = 8, 16, (0, 1, 2)
METHOD = {
    "tokens_per_s": "sampled tokens that were trained on, over the counted steps, from the end of "
    f"step {plan.WARM_UP} to the end of the last",
    "ideal": "of a token: the most of generation by both engines, training, and the processor time "
    "of both over the cores, each measured alone; updates of weights, replay and waiting are free",
    "idle": "learner: not in an update; engines: nothing to run, on average",
    "latency": "drawn by the words of a query: the same for all modes; tail: log-normal, p50 200 "
    f"ms, p99 2 s; scaled: of its shape, its mean {plan.SEARCH_SHARE:g} of a turn's generation",
    "em_goal_s": "seconds of training to greedy exact match .9; without the evaluations where "
    "training stands still for them, with them where it does not",
    "difference": f"of greedy exact match at the end from that of {plan.BASELINE}, paired by seed",
}


@dataclass(frozen=True)
class BenchEndToEndOptions(harness.BenchOptions):
    """Options of `forage bench end-to-end`."""

    overrides: tuple[str, ...] = overrides()
    quick: bool = option("six cells of one seed: about eleven minutes", default=False)
    modes: tuple[str, ...] = option(
        f"schedules to run (default all): {', '.join(MODES)}", default=(), metavar="NAME"
    )
    latencies: tuple[str, ...] = option(
        f"of searches, to run (default all): {', '.join(LATENCIES)}", default=(), metavar="NAME"
    )
    seeds: tuple[int, ...] = option(
        "seeds to run (default 0 1 2; quick: 0)", default=(), metavar="N", least=0
    )
    steps: int | None = option(
        f"steps that each pace counts (default {STEPS}; quick: {QUICK_STEPS})", metavar="N", least=1
    )
    only: Literal["pace", "em"] | None = option(
        "pace: tokens a second alone; em: whole runs to exact match alone (default both)"
    )
    settled: bool = option(
        "begin with a policy that has been taught to search, and hold it as it is", default=False
    )
    headline: str = option(
        "asynchronous mode that the ratios are of", default=HEADLINE, metavar="NAME"
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
        for flag, given, known in (
            ("--modes", self.modes, list(MODES)),
            ("--latencies", self.latencies, list(LATENCIES)),
            ("--headline", (self.headline,), [n for n, m in MODES.items() if m.kind == "async"]),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"{flag} {name!r}: one of {', '.join(known)}")
        self._refuse_what_does_nothing()
        if self.settled and self.only != "pace" and not self.quick:
            raise ConfigError("--settled learns nothing, so there is only its pace: --only pace")
        load(REPOSITORY / "configs" / "demo.yaml", self.overrides)

    def _refuse_what_does_nothing(self) -> None:
        for flag, what, given in (
            ("--modes", "modes", self.modes),
            ("--latencies", "latencies", self.latencies),
            ("--only", "cells", self.only),
        ):
            if self.quick and given:
                raise ConfigError(f"--quick chooses its own {what}: drop {flag}")
        if self.quick and len(self.seeds) > 1:
            raise ConfigError("--quick takes one seed: name one after --seeds")
        if self.only == "em" and self.steps:
            raise ConfigError(f"--only em trains whole runs of {plan.EM_STEPS} steps: drop --steps")

    @property
    def own(self) -> tuple[str, ...]:
        """The overrides of all cells."""
        return (*(("learner.lr=0",) if self.settled else ()), *self.overrides)

    @property
    def cells(self) -> list[Cell]:
        """The cells in the order in which they are measured."""
        if self.quick:
            seed = self.seeds[0] if self.seeds else 0
            return list(plan.quick_cells(seed, self.steps or QUICK_STEPS))
        return list(
            plan.cells(
                self.modes or tuple(MODES),
                self.latencies or LATENCIES,
                self.seeds or SEEDS,
                self.steps or STEPS,
                self.only or "all",
            )
        )


def left(options: BenchEndToEndOptions, kept: Kept) -> Iterator[Cell]:
    """The cells that are not measured."""
    return (cell for cell in options.cells if kept.row(cell) is None)


def present(options: BenchEndToEndOptions, kept: Kept, on: Row) -> None:
    """Print and write what there is."""
    cells, cores = options.cells, on["cores"]
    rows = [row for cell in cells if (row := kept.row(cell)) is not None]
    if not rows:
        return
    seeds = dict.fromkeys(cell.seed for cell in cells)
    parts = {seed: alone for seed in seeds if (alone := kept.parts(seed)) is not None}
    found = summary(rows, parts, options.headline, cores)
    where = ", ".join(f"{name} {value}" for name, value in on.items())
    title = f"one work, {len(rows)} cells; async_over_… are of {options.headline}; {where}"
    remaining = [cell.name for cell in left(options, kept)]
    more = {"rows": rows, "parts": {seed: plain(each) for seed, each in parts.items()}}
    written = found | more | {"left": remaining, "machine": on, "method": METHOD}
    harness.finish(options, written, tables(rows, parts, found, title, cores), width=190)
    print(f"plot: {draw(rows, options.plot or options.out / 'end_to_end.png')}")


def bench(options: BenchEndToEndOptions) -> int:
    """Measure what is missing, then report; 3 when something is left. Raises ConfigError,
    BenchError.
    """
    report, on = harness.reporter(), harness.machine()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the learner's own process has it
    digest = harness.digest_of(harness.sources(*CODE))
    of = f"{digest} {on['processor']} {on['cores']}{' settled' * options.settled}"
    kept = Kept(options.out, of, options.own)
    try:
        measure(options.cells, kept, options.minutes, report, options.settled)
    except ColdStartFailed as error:
        raise harness.BenchError(str(error)) from error
    present(options, kept, on | {"load_after": harness.machine()["load"]})
    remaining = list(left(options, kept))
    if remaining:
        minutes = sum(cell.about_s for cell in remaining) / 60.0
        print(
            f"{len(remaining)} cells left, about {minutes:.0f} minutes, {remaining[0].name} first: "
            "give the same command again to go on"
        )
    return Exit.STOPPED if remaining else Exit.DONE

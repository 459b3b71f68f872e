"""A plan beside the run that it is of: `forage bench plan [--quick] [--json FILE]`.

Generation is measured of a model alone, and two runs are fitted; by these constants other runs are
planned, and then run in full: one to three actors, staleness 0 to 4, latencies up to a second, two
models. Finished measurements are files in `--out`: the same command goes on where it
was cut off, and `--minutes` ends a slice. Exit code 3: something is left.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from configs.runtime.process import REPOSITORY, Exit
from scripts.bench import harness
from scripts.bench.end_to_end.run import Slice
from scripts.bench.plan.cells import Cell, all_cells, quick_cells
from scripts.bench.plan.compared import Planner, Row, apart, compared, measured, summary
from scripts.bench.plan.large import large
from scripts.bench.plan.report import tables
from scripts.bench.plan.run import Files, Kept, fits, in_order, measure, repeats
from scripts.command.options import option

CODE = (
    "actors", "learner", "replay", "weight_sync", "retrieval_server", "configs", "scripts.fleet",
    "scripts.setup", "scripts.train_sync", "scripts.demo", "scripts.bench.overlap",
    "scripts.bench.harness", "scripts.bench.end_to_end", "scripts.plan.past",
    "scripts.plan.workload",
    *(f"scripts.bench.plan.{name}" for name in ("cells", "generation", "record", "run", "worker")),
)  # fmt: skip
STEPS, QUICK_STEPS = 16, 8
GOALS = {"plan_error_max": harness.at_most(0.15), "actors_10000_s": harness.at_most(60.0)}
METHOD = {
    "plan_error_max": "the largest |planned / measured - 1| of tokens/s, of all configurations "
    "that were run but those that constants are fitted to; seconds a step, idle and staleness are "
    "told beside it and are not part of it",
    "runs_apart_max": "how much faster one run was than another of the same configuration, of "
    "those that constants are fitted to: the largest max / min - 1 of tokens/s (None by `--quick`)",
    "tokens_per_s": "tokens that the policy sampled, trained on in the counted steps, over their "
    "seconds: of the run, and of the plan as the mean of four simulations of as many steps",
    "errors": "of tokens/s and of a step's seconds: planned / measured - 1; of the learner's idle "
    "share (not in an update) and of staleness (mean over trained tokens): planned - measured",
    "constants": "of a model's generation alone: 8, 32, 96 and 256 rollouts in flight, no latency, "
    "a token that is taken in, what rollouts look like; of two runs with one actor and no latency, "
    "which are not compared, each made twice (`--quick`: once): at staleness 0 the learner's step, "
    "what it has beside its update, the pause, how long neither works, the cores of all that work "
    "for an engine, and how much longer than alone its step takes (so that this run is as fast as "
    "planned); at staleness 1 how much longer an update takes (`queued`), and by how much engines "
    "are slowed down (`beside`, likewise)",
    "policy": "one that has learned to search, and learns no more; `deep`: the same in eight "
    "layers, of which six add nothing",
    "actors_10000_s": "processor seconds of one simulation: 10,000 actors of 8 rollouts, 500,000 "
    "rollouts trained on",
}


@dataclass(frozen=True)
class BenchPlanOptions(harness.BenchOptions):
    """Options of `forage bench plan`."""

    quick: bool = option("three configurations of the demo: at most ten minutes", default=False)
    minutes: float = option(
        "length of a slice: nothing but the first begins that would end later",
        default=30.0,
        least=0,
    )
    out: Path = option(
        "folder that keeps finished measurements", default=REPOSITORY / "runs" / "bench_plan"
    )

    @property
    def cells(self) -> list[Cell]:
        """The configurations in the order in which they are run."""
        return quick_cells(QUICK_STEPS) if self.quick else all_cells(STEPS)


def bench(options: BenchPlanOptions) -> int:
    """Measure what is missing, plan, compare; 3 when something is left. Raises BenchError."""
    report, on = harness.reporter(), harness.machine()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the learner's own process has it
    locks = (REPOSITORY / "requirements").glob("*.lock")
    digest = harness.digest_of([*harness.sources(*CODE), *locks])
    kept = Kept(options.out, f"{digest} {on['processor']} {on['cores']} {options.quick}")
    files, time_left = Files(report), Slice(options.minutes)
    measure(options.cells, kept, files, time_left, quick=options.quick, report=report)
    found = figures(options.cells, kept, files, on["cores"], quick=options.quick)
    found |= {"machine": on, "method": METHOD}
    found |= _large(report) if not found["left"] else {"actors_10000_s": None}
    told = ", ".join(f"{name} {value}" for name, value in on.items())
    title = f"{len(found['rows'])} configurations; {told}"
    harness.finish(options, found, tables(found, GOALS, title), width=80)
    if not found["left"]:
        return Exit.DONE
    print(f"{len(found['left'])} left: give the same command again to go on")
    return Exit.STOPPED


def figures(
    cells: Sequence[Cell], kept: Kept, files: Files, cores: int, *, quick: bool
) -> dict[str, Any]:
    """What there is, and what is left."""
    rows, constants, runs = list[Row](), dict[str, Any](), dict[str, list[Row]]()
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model]
        pairs = fits(model, own[0].steps, repeats(quick))
        fitted = [kept.row(cell) for pair in pairs for cell in pair]
        generation = kept.generation(model)
        if generation is None or None in fitted:
            continue
        runs[model] = [row for row in fitted if row is not None]
        planner = Planner(generation, files.model(model), files.task, cores)
        known = planner.constants(pairs, runs[model])
        constants[model] = msgspec.to_builtins(known)
        for cell in own:
            if (row := kept.row(cell)) is not None:
                rows.append(compared(cell, planner.planned(cell, known), measured(row)))
    left = [cell.name for cell in in_order(cells, repeats(quick)) if kept.row(cell) is None]
    found = {"rows": rows, "constants": constants, "fitted": runs, "left": left}
    return summary(rows) | {"runs_apart_max": apart(runs)} | found


def _large(report: harness.Report) -> dict[str, Any]:
    report("10,000 actors, 500,000 rollouts: about a minute")
    took = large()
    return {"actors_10000_s": took.cpu_s, "actors_10000_wall_s": took.wall_s,
            "actors_10000_rollouts": took.rollouts}  # fmt: skip

"""A plan beside the run that it is of: `forage bench plan [--quick] [--json FILE]`.

What generation, training and both beside one another take is measured of a model alone; of these
constants runs are planned, and then run in full: one to three actors, staleness 0 to 4, latencies
up to a second, two models. Finished measurements are files in `--out`: the same command goes on
where it was cut off, and `--minutes` ends a slice. Exit code 3: something is left.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from configs.runtime.process import REPOSITORY, Exit
from scripts.bench import harness
from scripts.bench.end_to_end.run import Slice
from scripts.bench.plan.cells import Cell, all_cells, quick_cells
from scripts.bench.plan.constants import Constants, constants_of, workload_of
from scripts.bench.plan.large import large
from scripts.bench.plan.run import Files, Kept, measure
from scripts.options import option
from scripts.plan.build import Cores, on_cores
from scripts.plan.outcome import Outcome
from scripts.plan.simulation import simulate
from scripts.plan.workload import Latency
from scripts.setup.model_size import find_model

CODE = (
    "actors", "learner", "replay", "weight_sync", "retrieval_server", "configs", "scripts.fleet",
    "scripts.setup", "scripts.train_sync", "scripts.demo", "scripts.bench.overlap",
    "scripts.bench.harness", "scripts.bench.end_to_end",
    *(f"scripts.bench.plan.{name}" for name in ("cells", "parts", "record", "run", "worker")),
)  # fmt: skip
STEPS, QUICK_STEPS, PLANNED = 12, 8, 60
GOALS = {"plan_error_max": harness.at_most(0.15), "actors_10000_s": harness.at_most(60.0)}
METHOD = {
    "plan_error_max": "the largest |planned / measured - 1| of tokens/s and of a step's seconds, "
    "of all configurations that were run; constants are fitted on none of them",
    "actors_10000_s": "processor seconds of one simulation: 10,000 actors of 8 rollouts, 500,000 "
    "rollouts trained on",
    "tokens_per_s": "as in forage bench end-to-end: sampled and trained on in the counted steps",
    "constants": "generation alone with 32, 96 and 256 rollouts in flight and no latency, training "
    "alone, and both at once; the pause for weights and their way are the plan's own",
}


@dataclass(frozen=True)
class BenchPlanOptions(harness.BenchOptions):
    """Options of `forage bench plan`."""

    quick: bool = option("three configurations of the demo: about ten minutes", default=False)
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


def planned(cell: Cell, kept: Kept, files: Files, cores: int) -> Outcome:
    """The plan of a configuration whose model's parts are measured."""
    path = files.model(cell.model)
    config, model = cell.config(files.task, path), find_model(str(path))
    latency = Latency(cell.latency.p50_s, cell.latency.p99_s)
    parts = kept.parts(cell.model)
    assert parts is not None
    costs = Cores.measured(msgspec.to_builtins(constants(cell.model, kept, files, cores)))
    scenario = on_cores(config, model, cores, costs, workload_of(parts, latency))
    return simulate(scenario, steps=PLANNED, warm_up=cell.uncounted)


def constants(name: Any, kept: Kept, files: Files, cores: int) -> Constants | None:
    """A model's constants; None where its parts are not measured."""
    parts = kept.parts(name)
    if parts is None:
        return None
    path = files.model(name)
    return constants_of(parts, path.name, find_model(str(path)).parameters, cores)


def compared(cell: Cell, row: dict[str, Any], plan: Outcome) -> dict[str, Any]:
    """A configuration's row: planned, measured, and the errors."""
    pairs = {
        "tokens_per_s": (plan.trained_per_s, row["tokens_per_s"]),
        "step_s": (plan.step_s, row["step_s"]),
    }
    return {
        "name": cell.name,
        "cell": msgspec.to_builtins(cell),
        "plan": asdict(plan),
        "measured": row,
        "errors": {name: ours / theirs - 1.0 for name, (ours, theirs) in pairs.items()},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest error of any row, and whose it is; None without rows."""
    errors = [(abs(e), row["name"], what) for row in rows for what, e in row["errors"].items()]
    worst = max(errors, default=None)
    return {
        "plan_error_max": worst and worst[0],
        "plan_error_max_of": worst and f"{worst[1]}: {worst[2]}",
        "plan_error_mean": sum(e for e, _, _ in errors) / len(errors) if errors else None,
    }


def tables(found: dict[str, Any], title: str) -> list[Table]:
    """Every configuration, the constants, and the goals."""
    cells = Table("configuration", "tokens/s: plan", "run", "error", "s/step: plan", "run", "error",
                  "idle: plan", "run", "staleness: plan", "run", title=title)  # fmt: skip
    for row in found["rows"]:
        plan, run, errors = row["plan"], row["measured"], row["errors"]
        cells.add_row(
            row["name"],
            f"{plan['trained_per_s']:,.0f}",
            f"{run['tokens_per_s']:,.0f}",
            f"{errors['tokens_per_s']:+.2f}",
            f"{plan['step_s']:.2f}",
            f"{run['step_s']:.2f}",
            f"{errors['step_s']:+.2f}",
            f"{plan['learner_idle']:.2f}, {plan['engine_idle']:.2f}",
            f"{run['learner_idle']:.2f}, {run['engine_idle'] or 0:.2f}",
            f"{plan['staleness']:.2f} ({plan['staleness_max']})",
            f"{run['staleness']:.2f} ({run['staleness_max']:.0f})",
        )
    names = [name for name in Constants.__struct_fields__ if name != "model"]
    table = Table("constant", *found["constants"])
    for name in names:
        table.add_row(name, *(f"{each[name]:.3g}" for each in found["constants"].values()))
    return [cells, table, harness.goals_table(found, GOALS)]


def bench(options: BenchPlanOptions) -> int:
    """Measure what is missing, plan, compare; 3 when something is left. Raises BenchError."""
    report, on = harness.reporter(), harness.machine()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the learner's own process has it
    locks = (REPOSITORY / "requirements").glob("*.lock")
    digest = harness.digest_of([*harness.sources(*CODE), *locks])
    kept = Kept(options.out, f"{digest} {on['processor']} {on['cores']} {options.quick}")
    files, time_left = Files(report), Slice(options.minutes)
    measure(options.cells, kept, files, time_left, quick=options.quick, report=report)
    found = figures(options, kept, files, on["cores"]) | {"machine": on, "method": METHOD}
    found |= _large(report) if not found["left"] else {"actors_10000_s": None}
    told = ", ".join(f"{name} {value}" for name, value in on.items())
    title = f"{len(found['rows'])} configurations; {told}"
    harness.finish(options, found, tables(found, title), width=170)
    if not found["left"]:
        return Exit.DONE
    print(f"{len(found['left'])} left: give the same command again to go on")
    return Exit.STOPPED


def figures(options: BenchPlanOptions, kept: Kept, files: Files, cores: int) -> dict[str, Any]:
    """What there is, and what is left."""
    rows = [
        compared(cell, row, planned(cell, kept, files, cores))
        for cell in options.cells
        if (row := kept.row(cell)) is not None
    ]
    models = dict.fromkeys(cell.model for cell in options.cells)
    known = {name: constants(name, kept, files, cores) for name in models}
    return summary(rows) | {
        "rows": rows,
        "constants": {name: msgspec.to_builtins(each) for name, each in known.items() if each},
        "left": [cell.name for cell in options.cells if kept.row(cell) is None],
    }


def _large(report: harness.Report) -> dict[str, Any]:
    report("10,000 actors, 500,000 rollouts: about a minute")
    took = large()
    return {"actors_10000_s": took.cpu_s, "actors_10000_wall_s": took.wall_s,
            "actors_10000_rollouts": took.rollouts}  # fmt: skip

"""The plan of a configuration beside its run: constants, what is planned, and the errors."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from scripts.bench.end_to_end.task import TaskFiles
from scripts.bench.plan.cells import Cell
from scripts.bench.plan.constants import Constants, Fit, constants_of, workload_of
from scripts.bench.plan.record import Generation
from scripts.plan.build import Cores, on_cores
from scripts.plan.simulation import simulate
from scripts.plan.workload import Latency
from scripts.setup.model_size import Model, find_model

DRAWS, FITTED = 4, 2  # simulations of a configuration, of which the mean is its plan; of a fit
FIGURES = (  # of a plan and of a run
    "tokens_per_s", "step_s", "learner_idle", "engine_idle", "staleness", "staleness_max",
    "update_s", "wait_s", "rest_s",
)  # fmt: skip
BY_SHARE, BY_DIFFERENCE = ("tokens_per_s", "step_s"), ("learner_idle", "staleness")
Row = dict[str, Any]


@dataclass(frozen=True)
class Planner:
    """Plans runs of one model by its generation. `cores`: of the machine; `path`: the model's
    folder; `files`: of the task; `fits`: simulations of a run that is fitted.
    """

    generation: Generation
    path: Path
    files: TaskFiles
    cores: int
    fits: int = FITTED

    def constants(self, pairs: Sequence[tuple[Cell, Cell]], rows: Sequence[Row]) -> Constants:
        """The constants by the runs that are fitted, `rows` in the order of their `pairs`."""
        serial, overlapped = (
            Fit(rows[which::2], partial(self._tokens_per_s, cell))
            for which, cell in enumerate(pairs[0])
        )
        return constants_of(
            self.generation,
            serial,
            overlapped,
            model=self.path.name,
            parameters=self._model.parameters,
        )

    def _tokens_per_s(self, cell: Cell, tried: Constants) -> float:
        return float(self.planned(cell, tried, self.fits)["tokens_per_s"])

    def planned(self, cell: Cell, constants: Constants, draws: int = DRAWS) -> Row:
        """The figures of a configuration's plan, counted over the steps that its run counts."""
        latency = Latency(cell.latency.p50_s, cell.latency.p99_s)
        workload = workload_of(self.generation, latency)
        config = cell.config(self.files, self.path)
        costs = Cores.measured(msgspec.to_builtins(constants))
        scenario = on_cores(config, self._model, self.cores, costs, workload)
        found = [
            simulate(scenario, steps=cell.steps, warm_up=cell.uncounted, seed=seed)
            for seed in range(draws)
        ]
        told = [asdict(each) | {"tokens_per_s": each.trained_per_s} for each in found]
        return {name: statistics.fmean(each[name] for each in told) for name in FIGURES}

    @property
    def _model(self) -> Model:
        return find_model(str(self.path))


def measured(row: Mapping[str, Any]) -> Row:
    """The same figures of a run: of tokens, those that were trained on in the counted steps."""
    return dict(row) | {"tokens_per_s": row["tokens"] / row["step_s"]}


def compared(cell: Cell, plan: Row, run: Row) -> Row:
    """A configuration's row: planned, measured, the errors; of shares by difference."""
    shares = {name: plan[name] / run[name] - 1.0 for name in BY_SHARE}
    return {
        "name": cell.name,
        "cell": msgspec.to_builtins(cell),
        "plan": plan,
        "run": run,
        "errors": shares | {name: plan[name] - run[name] for name in BY_DIFFERENCE},
    }


def apart(fitted: Mapping[str, Sequence[Row]]) -> float | None:
    """The largest share by which one run had more tokens/s than another of the same configuration:
    of those that are fitted, model by model, serial and overlapped in turn; None where each was
    made once. No plan can be nearer to all of them than that lets it.
    """
    shares = []
    for rows in fitted.values():
        for same in (rows[0::2], rows[1::2]):
            paces = [measured(row)["tokens_per_s"] for row in same]
            if len(paces) > 1:
                shares.append(max(paces) / min(paces) - 1.0)
    return max(shares, default=None)


def summary(rows: Sequence[Row]) -> Row:
    """The largest error of tokens/s, whose it is, and the mean; None without rows."""
    errors = [(abs(row["errors"]["tokens_per_s"]), row["name"]) for row in rows]
    worst = max(errors, default=None)
    return {
        "plan_error_max": worst and worst[0],
        "plan_error_max_of": worst and worst[1],
        "plan_error_mean": statistics.fmean(error for error, _ in errors) if errors else None,
        "configurations": len(errors),
    }

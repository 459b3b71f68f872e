"""The plan's benchmark: constants of parts, errors, and what is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pytest import approx

from scripts.bench.plan.bench import compared, planned, summary, tables
from scripts.bench.plan.cells import Cell, all_cells, late, quick_cells
from scripts.bench.plan.constants import constants_of, fitted
from scripts.bench.plan.large import large
from scripts.bench.plan.record import Parts, Rate, Training
from scripts.bench.plan.run import Kept
from scripts.plan.build import Cores
from scripts.plan.outcome import Outcome
from scripts.plan.simulation import simulate
from tests.scripts.plan.scenarios import scenario

ROLLOUTS = ((10, ((20, 30, True), (20, 0, False))),) * 4


def rate(n: int, launch_s: float = 0.01, sequence_s: float = 2e-4) -> Rate:
    return Rate(n, n / (launch_s + sequence_s * n), 1.2)


def parts(**others: Any) -> Parts:
    found = Parts(
        alone=tuple(map(rate, (32, 96, 256))),
        beside=rate(256),
        update_beside_s=0.8,
        training=Training(update_s=0.8, cpu_s=0.8, publish_s=0.01),
        prefill_s=1e-5,
        rollouts=ROLLOUTS,
    )
    return msgspec.structs.replace(found, **others)


def test_an_engines_step_is_fitted_less_what_it_takes_in() -> None:
    launch_s, sequence_s = fitted([rate(n) for n in (32, 96, 256)], 5e-5)
    assert (launch_s, sequence_s) == (approx(0.01), approx(1.5e-4))


def test_a_fit_has_no_part_below_zero() -> None:
    assert fitted([Rate(32, 4000.0, 1.0), Rate(256, 3000.0, 1.0)], 0.0)[0] == 0.0


def test_constants_are_those_of_the_parts() -> None:
    found = constants_of(parts(), "demo", 240_000, 2)
    assert found.learn_token_s == approx(0.8 / (4 * 80))
    assert found.sequence_s == approx(2e-4 - 1e-5 * 40 / 40)
    assert (found.learner_cores, found.engine_cores) == (approx(1.0), 1.2)
    assert Cores.measured(msgspec.to_builtins(found)).decode.launch_s == approx(0.01)


def test_what_slows_both_down_is_told_from_their_share_of_the_cores() -> None:
    both = parts(beside=rate(256, 0.02, 4e-4), update_beside_s=1.6)
    assert constants_of(both, "demo", 1, 100).beside == approx(2.0)
    shared = constants_of(both, "demo", 1, 1.1)  # of 2.2 cores that they want
    assert shared.beside == approx(1.0)
    assert constants_of(parts(), "demo", 1, 2).beside == 1.0


def test_the_configurations_differ_in_all_that_is_promised() -> None:
    cells = all_cells(12)
    assert len(cells) >= 6 and {cell.model for cell in cells} == {"demo", "deep"}
    assert {cell.actors for cell in cells} == {1, 2, 3}
    assert {cell.staleness for cell in cells} == {0, 1, 2, 4}
    assert max(cell.latency.p50_s for cell in cells) == 1.0
    assert sum(cell.about_s for cell in quick_cells(8)) < 400


class SomeFiles:
    """Files of a model of known shape."""

    def __init__(self, folder: Path) -> None:
        from scripts.bench.end_to_end.task import TaskFiles

        self.task = TaskFiles(*([folder] * 5))

    def model(self, name: str) -> Path:
        return Path("Qwen2.5-0.5B")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    yield Kept(tmp_path / "kept", "here")


def test_a_configuration_is_planned_from_its_models_parts(kept: Kept, tmp_path: Path) -> None:
    kept.parts("demo", parts)
    cell = Cell("demo", 2, 1, late(0.1), 4)
    found = planned(cell, kept, SomeFiles(tmp_path), 2)  # type: ignore[arg-type]
    assert found.staleness_max <= 1 and found.update_s > 0.8 * 32 * 80 / (4 * 80)


def test_what_is_kept_is_not_measured_again(kept: Kept, tmp_path: Path) -> None:
    cell = Cell("demo", 1, 0, late(0.0), 4)
    assert kept.row(cell) is None and kept.parts("deep") is None
    assert kept.row(cell, lambda: {"step_s": 2.0}) == kept.row(cell) == {"step_s": 2.0}
    assert Kept(tmp_path / "kept", "other code").row(cell) is None


def outcome() -> Outcome:
    return simulate(scenario(), steps=4, warm_up=1)


def row(tokens: float, step: float) -> dict[str, Any]:
    plan = outcome()
    measured = {"tokens_per_s": plan.trained_per_s * tokens, "step_s": plan.step_s * step}
    more = {"learner_idle": 0.1, "engine_idle": None, "staleness": 0.0, "staleness_max": 0.0}
    return compared(quick_cells(8)[0], measured | more, plan)


def test_the_error_is_the_largest_of_all_whichever_way() -> None:
    found = summary([row(1.0, 1.25), row(0.8, 1.0)])
    assert found["plan_error_max"] == approx(0.25)
    assert found["plan_error_max_of"].endswith("tokens_per_s")
    assert found["plan_error_mean"] == approx((0 + 0.2 + 0.25 + 0) / 4)
    assert summary([])["plan_error_max"] is None


def test_the_tables_show_plan_and_run() -> None:
    rows = [row(0.8, 1.25)]
    constants = {"demo": msgspec.to_builtins(constants_of(parts(), "m", 9, 2))}
    found = summary(rows) | {"rows": rows, "constants": constants, "actors_10000_s": None}
    cells, table, goals = tables(found, "title")
    assert cells.row_count == 1 and table.row_count == 11 and goals.row_count == 1


def test_a_large_fleet_is_timed() -> None:
    took = large(actors=40, rollouts=400)
    assert took.rollouts == 400 and 0 < took.cpu_s < 30

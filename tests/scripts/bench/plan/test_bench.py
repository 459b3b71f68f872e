"""The plan's benchmark: constants of generation and of fitted runs, errors, and what is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pytest import approx

from scripts.bench.end_to_end.run import Slice
from scripts.bench.end_to_end.task import TaskFiles
from scripts.bench.plan.bench import GOALS, figures
from scripts.bench.plan.cells import NONE, Cell, all_cells, fitted_cells, late, quick_cells
from scripts.bench.plan.compared import Planner, apart, compared, measured, summary
from scripts.bench.plan.constants import (
    Constants,
    Fit,
    constants_of,
    engine_cores,
    fitted,
    in_run,
    way_s,
    workload_of,
)
from scripts.bench.plan.large import large
from scripts.bench.plan.record import Generation, Rate
from scripts.bench.plan.report import tables
from scripts.bench.plan.run import Files, Kept, fits, in_order, measure
from scripts.plan.build import Cores
from scripts.plan.workload import Latency

SHAPES = ((10, ((20, 30, True, 1, 0, 0, 0), (20, 0, False, 0, 0, 0, 0))),) * 8
SERIAL = {
    "step_s": 2.0, "update_s": 1.2, "wait_s": 0.7, "rest_s": 0.06, "pause_s": 0.05,
    "tokens": 5120.0, "learner_idle": 0.4, "engine_idle": 0.65, "staleness": 0.0,
    "staleness_max": 0.0, "cpu": {"engine": 0.3, "learner": 0.63, "actor": 0.1},
}  # fmt: skip
OVERLAPPED = SERIAL | {
    "step_s": 1.6, "update_s": 1.5, "staleness": 0.9, "staleness_max": 1.0,
    "cpu": {"engine": 0.8, "learner": 0.6, "actor": 0.2, "replay": 0.04},
}  # fmt: skip


def rate(n: int, launch_s: float = 0.01, sequence_s: float = 2e-4) -> Rate:
    return Rate(n, 0.9 * n, 0.9 * n / (launch_s + sequence_s * 0.9 * n), 1.2, 0.02)


def generation() -> Generation:
    return Generation(tuple(map(rate, (32, 96, 256))), 1e-5, SHAPES, 8, 1)


def constants() -> Constants:
    serial = Fit([SERIAL], lambda each: 5120 / (1.0 + 50 * each.launch_s))  # 2 s a step at .02
    overlapped = Fit([OVERLAPPED], lambda each: 5120 / (1.28 * each.beside))
    return constants_of(generation(), serial, overlapped, model="demo", parameters=240_000)


def test_an_engines_step_is_fitted_less_what_it_takes_in() -> None:
    launch_s, sequence_s = fitted([rate(n) for n in (32, 96, 256)], 5e-5)
    assert (launch_s, sequence_s) == (approx(0.01), approx(1.5e-4))


def test_rollouts_are_those_measured_and_searches_take_what_they_took() -> None:
    work = workload_of(generation(), Latency(0.5, 0.5))
    assert (len(work.shapes), work.siblings, work.beside_s) == (8, 8, 0.02)
    assert (work.tokens, work.sampled_tokens, work.searches) == (80, 40, 1)


def test_a_fit_has_no_part_below_zero() -> None:
    assert fitted([Rate(32, 32, 4000.0, 1.0, 0.0), Rate(256, 256, 3000.0, 1.0, 0.0)], 0.0)[0] == 0.0


def test_constants_are_those_of_generation_and_of_the_fitted_runs() -> None:
    found = constants()
    assert found.learn_token_s == approx(1.2 / (5120 * 2))  # a token is read for each sampled
    assert found.launch_s == approx(0.02, rel=0.01)  # twice as in generation alone
    assert found.sequence_s == approx(2 * (2e-4 - 1e-5 * 40 / 40), rel=0.01)
    assert (found.learner_cores, found.engine_cores) == (approx(1.05), approx(0.4 / 0.35))
    assert (found.publish_s, found.pause_s) == (0.06, 0.05)
    assert found.transfer_s == approx(0.65 * 2.0 - 1.2 - 0.06)
    assert (found.beside, found.queued) == (approx(1.25, abs=0.003), approx(1.5 / 1.2))
    cores = Cores.measured(msgspec.to_builtins(found))
    assert (cores.decode.launch_s, cores.queued) == (found.launch_s, found.queued)


@pytest.mark.parametrize(("step_s", "factor"), [(0.1, 0.2), (99.0, 5.0)])
def test_what_is_fitted_lies_within_its_bounds(step_s: float, factor: float) -> None:
    fit = Fit([SERIAL | {"step_s": step_s}], lambda each: 5120 / (1.7 + each.launch_s))
    before = constants()
    assert in_run(before, fit).launch_s == approx(factor * before.launch_s, rel=0.05)


def test_a_step_whose_engine_never_waits_for_weights_leaves_them_no_time() -> None:
    assert way_s(SERIAL | {"engine_idle": 0.5}) == 0.0


def test_runs_that_are_fitted_are_averaged() -> None:
    slow = SERIAL | {"update_s": 1.8, "rest_s": 0.09, "pause_s": 0.075, "step_s": 3.0}
    overlapped = Fit([OVERLAPPED], lambda each: 5120 / (1.28 * each.beside))
    both = Fit([SERIAL, slow], lambda each: 5120 / (1.0 + 50 * each.launch_s))
    found = constants_of(generation(), both, overlapped, model="demo", parameters=240_000)
    assert found.learn_token_s == approx(1.5 / (5120 * 2))
    assert (found.publish_s, found.pause_s) == (approx(0.075), approx(0.0625))
    assert found.launch_s == approx((6**0.5 - 1.0) / 50, rel=0.01)  # a step takes the root of 2 x 3


def test_all_that_works_for_an_engine_is_counted_by_its_busy_seconds() -> None:
    cpu = {"engine": 0.4, "learner": 1.0, "actor": 0.1, "replay": 0.05, "other": 0.3}
    assert engine_cores({"cpu": cpu, "engine_idle": 0.5}) == approx(1.1)


def test_the_configurations_differ_in_all_that_is_promised() -> None:
    cells = all_cells(12)
    assert len(cells) >= 6 and {cell.model for cell in cells} == {"demo", "deep"}
    assert {cell.actors for cell in cells} == {1, 2, 3}
    assert {cell.staleness for cell in cells} == {0, 1, 2, 4}
    assert max(cell.latency.p50_s for cell in cells) == 1.0
    assert sum(cell.about_s for cell in quick_cells(8)) < 200


@pytest.mark.parametrize("cells", [quick_cells(8), all_cells(8)])
def test_no_configuration_is_one_that_is_fitted(cells: list[Cell]) -> None:
    order = in_order(cells, 2)
    for model in dict.fromkeys(cell.model for cell in cells):
        first, again = fits(model, 8, 2)
        assert not {*first, *again} & set(cells)
        own = [cell for cell in order if cell.model == model]
        assert (tuple(own[:2]), tuple(own[-2:])) == (first, again)
    assert sorted(map(repr, set(order) & set(cells))) == sorted(map(repr, cells))


def test_a_run_is_planned_as_it_was_fitted(tmp_path: Path) -> None:
    files, cells = TaskFiles(*([tmp_path] * 5)), fitted_cells("demo", 1)
    planner = Planner(generation(), Path("Qwen2.5-0.5B"), files, cores=2, fits=1)
    fast = msgspec.structs.replace(constants(), beside=1.0, queued=1.0)
    rows = []
    for cell, factor in zip(cells, (1.1, 1.3), strict=True):
        plan = planner.planned(cell, fast)
        seconds = {name: factor * plan[name] for name in ("step_s", "update_s", "wait_s")}
        tokens, idle = plan["tokens_per_s"] * plan["step_s"], plan["engine_idle"]
        rows.append(SERIAL | seconds | {"tokens": tokens, "engine_idle": idle})
    found = planner.constants([cells], rows)
    assert found.launch_s > fast.launch_s
    for cell, run in zip(cells, rows, strict=True):
        plan = planner.planned(cell, found)
        assert plan["tokens_per_s"] == approx(run["tokens"] / run["step_s"], rel=0.1)
        assert plan["staleness_max"] <= cell.staleness


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    yield Kept(tmp_path / "kept", "here")


def test_what_is_kept_is_not_measured_again(kept: Kept, tmp_path: Path) -> None:
    cell = Cell("demo", 1, 0, NONE, 4)
    assert kept.row(cell) is None and kept.generation("demo") is None
    assert kept.row(cell, lambda: {"step_s": 2.0}) == kept.row(cell) == {"step_s": 2.0}
    assert kept.generation("demo", generation) == kept.generation("demo") == generation()
    assert kept.generation("deep") is None and kept.row(Cell("demo", 1, 1, late(0.1), 4)) is None
    assert Kept(tmp_path / "kept", "other code").row(cell) is None


def row(tokens: float, step: float) -> dict[str, Any]:
    run = measured(OVERLAPPED)
    plan = run | {"tokens_per_s": run["tokens_per_s"] * tokens, "step_s": run["step_s"] * step,
                  "staleness": 0.7}  # fmt: skip
    return compared(quick_cells(8)[0], plan, run)


def test_tokens_are_those_that_were_trained_on() -> None:
    assert measured(OVERLAPPED)["tokens_per_s"] == approx(5120 / 1.6)


def test_the_error_is_the_largest_of_tokens_a_second_whichever_way() -> None:
    found = summary([row(1.1, 1.5), row(0.8, 1.0)])
    assert found["plan_error_max"] == approx(0.2) and found["configurations"] == 2
    assert found["plan_error_max_of"] == quick_cells(8)[0].name
    assert found["plan_error_mean"] == approx(0.15)
    assert row(1.0, 1.0)["errors"]["staleness"] == approx(-0.2)
    assert summary([])["plan_error_max"] is None


def test_runs_of_the_same_say_how_far_apart_runs_are() -> None:
    serial, overlapped = OVERLAPPED | {"tokens": 100.0}, OVERLAPPED
    twice = [serial, overlapped, OVERLAPPED | {"tokens": 125.0}, overlapped]
    assert apart({"demo": twice, "deep": [overlapped] * 4}) == approx(0.25)
    assert apart({"demo": [serial, overlapped]}) is None


def test_the_tables_show_plan_and_run_in_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    told = {"demo": msgspec.to_builtins(constants())}
    rows = [row(0.8, 1.25) | {"name": max((cell.name for cell in all_cells(8)), key=len)}]
    found = summary(rows) | {"rows": rows, "constants": told, "actors_10000_s": None}
    found |= {"runs_apart_max": 0.25}
    made = tables(found, GOALS, "1 configuration")
    assert (made[0].row_count, made[2].row_count) == (4, 2)
    Console(width=80).print(*made)
    out = capsys.readouterr().out
    shown = ("tokens/s", "3,200", "2,560", "-20%", "-0.20", "beside", "missed", "runs_apart_max")
    for words in shown:
        assert words in out


def test_a_large_fleet_is_timed() -> None:
    took = large(actors=40, rollouts=400)
    assert took.rollouts == 400 and 0 < took.cpu_s < 30


@pytest.mark.soak("benchmarks")
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_generation_and_runs_are_measured_kept_and_gone_on_with(kept: Kept) -> None:
    cells, files, said = [Cell("demo", 1, 0, late(0.1), 2)], Files(print), list[str]()
    measure(cells, kept, files, Slice(0.0), quick=True, report=said.append)
    left = figures(cells, kept, files, 2, quick=True)["left"]
    assert kept.generation("demo") and left == [cell.name for cell in in_order(cells, 1)]
    measure(cells, kept, files, Slice(30.0), quick=True, report=said.append)
    found = figures(cells, kept, files, 2, quick=True)
    (row,), (serial, overlapped) = found["rows"], found["fitted"]["demo"]
    assert found["left"] == [] and found["plan_error_max"] == abs(row["errors"]["tokens_per_s"])
    assert row["run"]["staleness_max"] == serial["staleness_max"] == 0.0
    assert 0.0 < overlapped["staleness_max"] <= 1.0 and serial["pause_s"] > 0.0
    assert sum("generation alone" in each for each in said) == 1
    said.clear()
    measure(cells, kept, files, Slice(30.0), quick=True, report=said.append)
    assert said == []

"""The judges of part B: a command that ended with 0 still fails where its figures are wrong."""

import json
from pathlib import Path

import pytest

from replay.log.event_log import EventLog
from replay.log.records import Reported
from tests.gpu import fleet


def bad(figures: object) -> list[str]:
    """The names of the figures that fail a check."""
    return [each.name for each in figures if each.good is False]  # type: ignore[attr-defined]


def run(folder: Path, refits: float, **summary: object) -> Path:
    """A folder with what a run leaves."""
    (folder / "run").mkdir()
    (folder / "run" / "summary.json").write_text(json.dumps(summary))
    with EventLog.create(folder / "run" / "events.log") as log:
        reports = ((1, 0.0), (2, refits))
        log.append([Reported(1.0, 1, n, {"sync/refits": found}) for n, found in reports])
    return folder


@pytest.mark.parametrize(
    ("em", "refits", "wrong"),
    [
        (0.9, 0.0, []),
        (0.89, 0.0, ["EM at the end"]),
        (None, 0.0, ["EM at the end"]),
        (0.95, 1.0, ["sync/refits"]),
    ],
)
def test_a_demo_is_judged_by_its_last_evaluation_and_refits(
    em: float | None, refits: float, wrong: list[str], tmp_path: Path
) -> None:
    assert bad(fleet.demo(run(tmp_path, refits, em_final=em))) == wrong


def test_a_run_in_bf16_is_judged_by_its_versions_and_refits(tmp_path: Path) -> None:
    whole, short = {"steps": 200, "weight_syncs": 190}, {"steps": 120, "weight_syncs": 0}
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    assert not bad(fleet.probed(run(tmp_path / "a", 0.0, **whole)))
    wrong = bad(fleet.probed(run(tmp_path / "b", 3.0, **short)))
    assert wrong == ["steps", "weight_syncs", "sync/refits"]


def test_a_benchmark_is_judged_by_its_goals(tmp_path: Path) -> None:
    from scripts.bench.engine.bench import GOALS

    met = {name: goal.limit for name, goal in GOALS.items()}
    (tmp_path / fleet.FOUND).write_text(json.dumps(met))
    assert not bad(fleet.goals_of_the_engine(tmp_path))
    met |= {"preemptions_per_1000": 2.0, "capacity_over_best_fixed_low": 0.5}
    del met["probe_mean_bf16"]
    (tmp_path / fleet.FOUND).write_text(json.dumps(met))
    wrong = ["capacity_over_best_fixed_low", "preemptions_per_1000", "probe_mean_bf16"]
    assert bad(fleet.goals_of_the_engine(tmp_path)) == wrong


def test_transports_are_judged_by_the_rows_that_should_be_there(tmp_path: Path) -> None:
    row = {"transport": "cuda_ipc", "nbytes": 10**9, "whole_s": 2.0, "generation_pause_s": 0.01}
    (tmp_path / fleet.FOUND).write_text(json.dumps({"rows": [row]}))
    found = {each.name: each.good for each in fleet.transports(tmp_path)}
    assert found["whole_s"] is None and found["generation_pause_s"] is True  # a speed: look at it
    (tmp_path / fleet.FOUND).write_text(json.dumps({"rows": []}))
    assert bad(fleet.transports(tmp_path)) == ["rows of 1,000 MB by cuda_ipc"]


def test_a_command_that_fails_is_not_judged_further() -> None:
    (only,) = fleet.command(("-c", "raise SystemExit(3)"), fleet.demo)
    assert (only.value, only.good) == ("3", False)
    written = ("-c", "open('{folder}/found.json', 'w').write('{{\"rows\": []}}')")
    assert bad(fleet.command(written, fleet.transports)) == ["rows of 1,000 MB by cuda_ipc"]

"""EMA-PG taken apart: cells that differ by one change, and what may be claimed of their runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from configs.runtime.process import REPOSITORY
from scripts.bench.algorithms import ablation
from scripts.bench.algorithms.ablation import ALL, BASELINE, CELLS, Difference
from scripts.bench.staleness.run import Job
from scripts.bench.staleness.slices import Slice

DEMO = REPOSITORY / "configs" / "demo.yaml"


def learner(cell: str) -> dict[str, Any]:
    config = load(DEMO, CELLS[cell]).learner
    return {name: getattr(config, name) for name in config.__struct_fields__}


def changed(cell: str) -> set[str]:
    base = learner(BASELINE)
    return {name for name, value in learner(cell).items() if value != base[name]}


def test_each_cell_changes_one_thing_and_the_last_but_one_all() -> None:
    alone = {name: changed(name) for name in CELLS if name not in (BASELINE, ALL)}
    assert alone == {
        "EMA anchor": {"anchor"},
        "top-k KL": {"kl_top_k"},
        "KL weight": {"kl_weight"},
        "clip-higher": {"clip_high"},
        "sequence weights": {"behaviour_level"},
    }
    assert changed(ALL) == set.union(*alone.values()) - {"behaviour_level"}


@pytest.mark.parametrize(
    ("by_seed", "verdict"),
    [
        ((0.1, 0.001, 0.2), "better"),
        ((-0.1, -0.2, -0.1), "worse"),
        ((0.1, 0.2, -0.001), "none shown"),
        ((0.1, 0.2, 0.0), "none shown"),
        ((0.1, 0.2), "none shown"),
        ((), "none shown"),
    ],
)
def test_a_difference_is_claimed_where_all_seeds_agree(
    by_seed: tuple[float, ...], verdict: str
) -> None:
    assert Difference(by_seed).verdict == verdict


def record(em: float) -> dict[str, Any]:
    names = ("sampled", "sampled_1", "sampled_2", "greedy", "greedy_1", "greedy_2")
    evaluations = [{"update": 10 * n} | dict.fromkeys(names, em) for n in range(4)]
    return {"evaluations": evaluations, "updates": [], "seconds": 1.0, "collapsed": False}


def test_cells_are_compared_with_the_baseline_of_their_age_seed_by_seed(tmp_path: Path) -> None:
    finished, jobs = Slice(tmp_path, workers=1, minutes=0.0), {}
    known = {(BASELINE, 0, 0): 0.5, (BASELINE, 0, 1): 0.6, (BASELINE, 0, 2): 0.7}
    known |= {("top-k KL", 0, 0): 0.7, ("top-k KL", 0, 1): 0.65, ("top-k KL", 0, 2): 0.8}
    known |= {(BASELINE, 8, 0): 0.9, ("top-k KL", 8, 0): 0.8}
    for (cell, age, seed), em in known.items():
        job = Job(CELLS[cell], age, seed, 10)
        jobs[cell, age, seed] = job
        (tmp_path / f"{job.name}.json").write_text(json.dumps(record(em) | {"seed": seed}))
    missing = (ALL, 0, 0)
    jobs[missing] = Job(CELLS[ALL], 0, 0, 10)
    found = ablation.summary(jobs, finished)
    told = {(row["variant"], row["staleness"]): row for row in found["ablation"]}
    assert told["top-k KL", 0]["difference"] == pytest.approx({0: 0.2, 1: 0.05, 2: 0.1})
    assert [told["top-k KL", age]["verdict"] for age in (0, 8)] == ["better", "none shown"]
    assert told[BASELINE, 0]["verdict"] is None
    assert found["ablation_missing"] == [ablation.label(missing)]
    table = ablation.make_table(found["ablation"])
    assert table.row_count == 4
    ablation.draw(found["ablation"], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000

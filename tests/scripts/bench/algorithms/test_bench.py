"""The algorithms' benchmark: both sides do the work that they are compared by."""

import json
from pathlib import Path

import pytest
import torch

from scripts.bench.algorithms import topk
from scripts.bench.algorithms.bench import GOALS, BenchAlgorithmsOptions, bench, passes

SMALL = topk.Size(vocabulary=300, tokens=40, hidden=8)


@pytest.mark.slow
def test_both_sides_take_both_passes_and_only_one_finds_candidates() -> None:
    for k in (0, 5):
        run, device = topk.HeadRun(k, "", 1, SMALL), torch.device("cpu")
        figures = topk.take(run, device)
        kinds = ("wall_s", "cpu_s", "bytes")
        assert figures.keys() == {f"{name}_{kind}" for name in topk.PASSES for kind in kinds}
        work = topk.Work(run, device)
        reference, found = work.score()
        assert reference.shape == (40,) and (found is None) == (k == 0)
        assert found is None or found.ids.shape == (40, 5)


def test_with_a_top_k_the_gradient_is_another() -> None:
    made = {}
    for k in (0, 5):
        work = topk.Work(topk.HeadRun(k, "", 1, SMALL), torch.device("cpu"))
        scored = work.score()
        work.move()
        work.gradient(*scored)
        made[k] = work._layer.weight.grad
    assert made[0] is not None and not torch.allclose(made[0], made[5])


@pytest.mark.slow
def test_the_dearer_pass_counts(tmp_path: Path) -> None:
    found = topk.compare(1, 1, print, top_k=5, size=SMALL)
    ratios = [found[f"topk_{name}_memory_over_head"] for name in topk.PASSES]
    assert found["topk_memory_over_head"] == max(ratios) and passes(found).row_count == 2


@pytest.mark.slow
@pytest.mark.soak("benchmarks")
@pytest.mark.timeout(1800)
def test_all_goals_are_met(tmp_path: Path) -> None:
    given = BenchAlgorithmsOptions(quick=True, json=tmp_path / "found.json", out=tmp_path / "out")
    assert bench(given) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(goal.met(found[name]) for name, goal in GOALS.items())

"""The algorithms' benchmark: both sides do the work that they are compared by."""

import json
from pathlib import Path

import pytest
import torch

from scripts.bench.algorithms import lora, topk
from scripts.bench.algorithms.bench import GOALS, BenchAlgorithmsOptions, bench, tables

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
    assert found["topk_memory_over_head"] == max(ratios)
    found |= {"lora_sync_bytes_share": 0.0, "lora_em_gap": 0.0}
    assert found.keys() >= GOALS.keys()
    assert [table.row_count for table in tables(found)] == [3, 2]


def test_an_adapter_is_hardly_a_fiftieth_of_smollm2() -> None:
    per_layer = 8 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert lora.sync_bytes_share() == pytest.approx(30 * per_layer / 134_515_008, rel=1e-6)
    assert lora.sync_bytes_share() <= 0.02


@pytest.mark.slow
@pytest.mark.soak("benchmarks")
@pytest.mark.timeout(900)
def test_all_goals_are_met(tmp_path: Path) -> None:
    bench(BenchAlgorithmsOptions(quick=True, json=tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(goal.met(found[name]) for name, goal in GOALS.items())

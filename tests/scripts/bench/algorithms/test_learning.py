"""Exact match by algorithm: settings that are ones, runs that are kept, and the worst seed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.load import load
from configs.runtime.process import REPOSITORY
from scripts.bench.algorithms import learning
from scripts.bench.algorithms.learning import ALGORITHMS, Row

DEMO = REPOSITORY / "configs" / "demo.yaml"
EM = {"grpo": (0.98, 0.96), "ppo": (0.95, 0.99), "lora": (0.97, 0.93)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_takes_no_more_steps_than_the_demo(name: str) -> None:
    assert load(DEMO, ALGORITHMS[name]).learner.total_steps == load(DEMO).learner.total_steps


def test_runs_are_kept_and_the_worst_seed_counts(tmp_path: Path) -> None:
    asked: list[int] = []

    def demo(seed: int, overrides: Sequence[str]) -> Row:
        asked.append(seed)
        name = next(name for name, own in ALGORITHMS.items() if own == tuple(overrides))
        return {"em_final": EM[name][seed], "sampled_em_final": 0.8, "steps": 80, "wall_s": 2.0}

    nothing, left = learning.measure([0], tmp_path, -1.0, print, demo)
    assert nothing == [] and left == [f"{name}, seed 0" for name in ALGORITHMS]
    learning.measure([0], tmp_path, 1.0, print, demo)
    rows, left = learning.measure([0, 1], tmp_path, 1.0, print, demo)
    assert asked == [0, 0, 0, 1, 1, 1] and left == []
    found = learning.summary(rows)
    assert (found["grpo_em"], found["ppo_em"], found["lora_em"]) == (0.96, 0.95, 0.93)
    assert found["lora_em_gap"] == pytest.approx(0.03)
    assert learning.make_table(rows).row_count == 6
    assert learning.summary([])["lora_em_gap"] is None


def test_an_adapter_is_hardly_a_fiftieth_of_smollm2() -> None:
    per_layer = 8 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    share = learning.sync_bytes_share()
    assert share == pytest.approx(30 * per_layer / 134_515_008, rel=1e-6) and share <= 0.02


def test_a_run_tells_how_far_it_is(tmp_path: Path) -> None:
    console, told = tmp_path / "demo.log", list[str]()
    console.write_text("forage demo\n")
    progress = learning.Progress(console, told.append)
    assert not progress() and told == []  # it is not time
    for line in ("", "step   66/80  reward 0.89  loss +0.086\n    kv 3%\n"):
        console.write_text(console.read_text() + line)
        progress.due_s = 0.0
        assert not progress() and not progress()
    assert told == ["no step yet", "step 66/80 reward 0.89"]

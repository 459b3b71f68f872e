"""The engine's benchmark: its figures have their names, and each part adds its own."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import cli
from scripts.bench.engine import bench

ROW = {"capacity": 24.0, "best_fixed": 24, "rate_over_best": 0.97, "rates": {24: 1.1},
       "rollouts": 500, "preemptions": 1}  # fmt: skip


@pytest.mark.slow  # vLLM is imported
def test_the_figures_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scheduling(*_: Any) -> dict[str, Any]:
        os.write(2, b"a library")
        names = ("probe_wait_s", "oversubscribed_over_fcfs", "oversubscribed_over_fcfs_updates")
        return dict(zip(names, (0.26, 2.1, 2.6), strict=True))

    def rollouts(*_: Any) -> dict[str, Any]:
        return {"rollouts_over_bare_vllm": 0.95}

    def fixed_beside_found(plan: Any, *_: Any) -> dict[str, Any]:
        return ROW | {"best_fixed": 20 if plan.machine.kv_tokens > 90_000 else 24}

    def probe_figures(path: str, versions: int) -> dict[str, float]:
        return {"probe_mean_bf16": 0.05, "probe_largest_bf16": float(versions)}

    files = SimpleNamespace(model=tmp_path)
    parts = [part.__name__ for part in bench.PARTS]
    assert parts == ["scheduling", "capacity", "probe", "rollouts"]
    monkeypatch.setattr("scripts.bench.engine.simulation.fixed_beside_found", fixed_beside_found)
    monkeypatch.setattr("scripts.bench.engine.probe.probe_figures", probe_figures)
    monkeypatch.setattr("scripts.bench.engine.stack.demo_files", lambda report: files)
    monkeypatch.setattr(bench, "PARTS", (scheduling, bench.capacity, bench.probe, rollouts))
    monkeypatch.setattr(bench, "LOG", tmp_path / "logs" / "engine.log")
    file = tmp_path / "found.json"
    assert cli.main(["bench", "engine", "--json", str(file)]) == 0
    assert (tmp_path / "logs" / "engine.log").read_text() == "a library"
    found = json.loads(file.read_text())
    assert found["capacity_over_best_fixed"] == 1.2 and found["rate_over_best_fixed"] == 0.97
    assert found["capacity_over_best_fixed_low"] == 1.0 and len(found["caches"]) == 3
    assert found["preemptions_per_1000"] == 2.0
    assert (found["probe_mean_bf16"], found["probe_largest_bf16"]) == (0.05, 20.0)
    assert (found["probe_wait_s"], found["rollouts_over_bare_vllm"]) == (0.26, 0.95)
    assert cli.main(["bench", "engine", "--quick", "--json", str(file)]) == 0
    quick = json.loads(file.read_text())
    assert len(quick["caches"]) == 1 and quick["probe_largest_bf16"] == 5.0
    assert "probe_largest_bf16" in capsys.readouterr().out

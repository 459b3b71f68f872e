"""Weight sync's benchmark at a tiny size: what it publishes is real, as is what it is beside."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from scripts import cli
from scripts.bench.weight_sync import bench
from scripts.bench.weight_sync.run import Row, run_row


@pytest.mark.slow
@pytest.mark.soak("benchmarks")
@pytest.mark.timeout(120)
def test_a_row_is_published_and_broadcast_in_each_way(tmp_path: Path) -> None:
    # A process of its own: the plain broadcast needs a default group, and here there may be one.
    with ProcessPoolExecutor(1, get_context("spawn")) as own:
        found = own.submit(run_row, Row(400_000, 40, 2), 1, tmp_path).result(timeout=100)
    times = ("whole_s", "publish_s", "broadcast_s", "raw_s", "per_parameter_s", "memcpy_s")
    assert all(found[name] > 0 for name in times)
    assert found["whole_s"] > found["publish_s"] + found["broadcast_s"]
    assert (found["nbytes"], found["tensors"], found["receivers"]) == (400_000, 40, 2)


def test_the_figures_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(of: Row, rounds: int, folder: Path) -> dict[str, Any]:
        names = ("whole_s", "publish_s", "broadcast_s", "apply_s", "generation_pause_s")
        ratios = {"over_raw_broadcast": of.nbytes / 5e8, "over_per_parameter": of.tensors / 1000}
        size = {"nbytes": of.nbytes, "tensors": of.tensors, "receivers": of.receivers}
        ratios["transfer_gb_per_s"] = 1.0
        ratios |= {"trainer_pause_over_memcpy": 1.1, "trainer_pause_over_copies": 1.0}
        return size | ratios | dict.fromkeys(names, 1.0)

    monkeypatch.setattr(bench, "run_row", row)
    file = tmp_path / "found.json"
    words = ["bench", "weight-sync", "--quick", "--updates", "0", "--json", str(file)]
    assert cli.main(words) == 0
    found = json.loads(file.read_text())
    assert (found["over_raw_broadcast"], found["over_per_parameter"]) == (1.0, 5.0)
    assert found["trainer_pause_over_memcpy"] == 1.1 and len(found["rows"]) == 4

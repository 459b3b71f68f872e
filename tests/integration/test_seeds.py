"""The demo learns in each of three worlds."""

import json
from collections.abc import Callable

import pytest

from configs.runtime.process import REPOSITORY
from scripts.demo.task import prepare
from scripts.runs.books import Audit
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.soak("seeds")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(launch: Callable[..., Run], seed: int) -> None:
    run = launch(f"seed={seed}", files=prepare(REPOSITORY / ".cache", seed, print))
    assert run.wait(1200) == 0, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["em_final"] > 0.85
    assert summary["retrieval_errors"] == summary["lost_requests"] == 0
    assert 0 <= summary["staleness_max"] <= summary["max_staleness"]
    books = Audit()
    books.fold(run.run_dir / "events.log")
    assert books.faults == [] and run.leftovers(5.0) == []

"""A rate that destroys what the demo learns, and a sentinel that lowers it until it learns."""

import json
from collections.abc import Callable

import pytest

from configs.runtime.process import REPOSITORY
from learner.health.sentinels import read_notes
from scripts.runs.books import Audit
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.soak("sentinels")]
RATE = 20 * 5e-4  # the demo's own is 5e-4


@pytest.mark.timeout(1800)
def test_the_demo_recovers_from_a_rate_that_is_far_too_high(launch: Callable[..., Run]) -> None:
    run = launch(
        f"learner.lr={RATE}",
        "learner.warmup_steps=25",  # it learns, and then falls
        *("replay.max_staleness=4", "actors.count=1"),  # fresher data shows `ess` too little
        *("actors.rollouts_in_flight=256", "actors.max_num_seqs=256"),
        "learner.checkpoint_every=5",
        "sentinels.ess=rollback",
        "sentinels.likelihood=rollback",
        "sentinels.rollback_rate=0.2",
    )
    assert run.wait(1500) == 0, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    made = [each.rollback for each in read_notes(run.run_dir) if each.rollback]
    figure = {name: summary[name] for name in ("em_start", "em_final", "steps")}
    figure |= {"lr": RATE, "rollbacks": [[each.step, each.to, each.scale] for each in made]}
    (REPOSITORY / ".cache" / "rollback.json").write_text(json.dumps(figure) + "\n")
    assert summary["status"] == "completed" and summary["em_final"] >= 0.9, figure
    assert 1 <= summary["rollbacks"] == len(made) <= 3, figure
    assert any(line.startswith("rollback 1 at step") for line in run.lines)
    books = Audit()
    books.fold(run.run_dir / "events.log")
    assert books.faults == [] and run.leftovers(5.0) == []

"""A run of the demo task whose rollouts are a program's, through the real command."""

import json
from collections.abc import Callable

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.runtime.process import REPOSITORY
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered
from scripts.runs.books import Audit
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PROGRAM = [
    "environment.name=program",
    f"environment.program.entry_point={REPOSITORY}/examples/search_with_openai.py:answer",
    "actors.shuffle_passages=false",
]


@pytest.mark.timeout(500)
def test_a_program_is_trained_and_the_books_close(launch: Callable[..., Run]) -> None:
    short = ["learner.total_steps=2", "learner.eval_every=2", "questions.eval_limit=10"]
    run = launch(*PROGRAM, *short, "replay.groups_per_step=2", "actors.count=1")
    assert run.wait(400) == 0, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    assert summary["retrieval_requests"] > 0 == summary["lost_requests"]
    books, log = Audit(), run.run_dir / "events.log"
    books.fold(log)
    assert books.fault_count == 0, books.summary()
    delivered = [each for each in read(log) if isinstance(each, Delivered)]
    rollouts = [decode_trajectory(each.payload) for each in delivered]
    assert any(rollout.search_count for rollout in rollouts)
    assert any(rollout.answer for rollout in rollouts)
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    assert events.Scalars("actor/merged_whole")[-1].value > 0.5
    assert run.leftovers(5.0) == []

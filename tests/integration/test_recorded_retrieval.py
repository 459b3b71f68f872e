"""A whole run again, its searches answered from its own log: no retrieval server, the same bits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.log.history import Recording, SearchLog
from tests.integration.conftest import Run
from tests.integration.test_lag0 import NOTHING_BATCHED, SHORT, completed

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.soak("resume")]

# Evaluations between the first and the last are pinned to no version: they may ask anything.
REPEATABLE = [*SHORT, *NOTHING_BATCHED, "learner.total_steps=2", "learner.checkpoint_every=2"]


def losses(run_dir: Path) -> list[float]:
    """What the learner reported."""
    reports = Recording.of(run_dir).reports
    return [reports[step]["learner/loss"] for step in (1, 2)]


def searches(run_dir: Path) -> dict[tuple[int, int], list[tuple[str, tuple[str, ...]]]]:
    """What each rollout asked for, and what it was shown."""
    return {
        (rollout.group_id, rollout.sibling): [
            (search.query, search.passage_ids) for turn in rollout.turns for search in turn
        ]
        for rollout in SearchLog(run_dir).rollouts()
    }


@pytest.mark.timeout(1500)
def test_a_run_is_repeated_without_its_retrieval_server(
    launch: Callable[..., Run],
) -> None:
    first = completed(launch(*REPEATABLE))
    again = completed(launch(*REPEATABLE, f"retrieval.recorded={first}", name="again"))
    assert not (again / "logs" / "retrieval_server.log").exists()
    assert losses(again) == losses(first)
    assert searches(again) == searches(first) and any(searches(first).values())
    summary = json.loads((again / "summary.json").read_text())
    assert summary["retrieval_requests"] > 0 and summary["retrieval_errors"] == 0

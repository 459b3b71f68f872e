"""A run whose retrieval server fails in every way: it completes, and nothing of that is in it."""

from collections.abc import Callable

import httpx
import pytest

from scripts.demo.task import DemoFiles
from tests.faults.faulty_run import SETTINGS, faulty_server, figures
from tests.faults.retrieval_proxy import FAULTS, MARKER, Manner
from tests.faults.texts_audit import finds_of
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SHORT = [
    "learner.total_steps=6",
    "learner.eval_every=3",
    "learner.checkpoint_every=3",
    "questions.eval_limit=40",
    "replay.groups_per_step=4",
    "actors.count=1",
    "retrieval.retries=0",  # so that rollouts die by it, and are leased again
]


def test_a_run_completes_whatever_its_retrieval_server_does(
    launch: Callable[..., Run], demo_files: DemoFiles
) -> None:
    with faulty_server(demo_files, Manner(rate=0.2, seed=5)) as (upstream, url):
        run = launch(*SHORT, *SETTINGS, f"retrieval.url={url}")
        assert run.wait(400) == 0, "".join(run.lines) + run.logs()
        met = httpx.get(f"{url}/faults", trust_env=False).json()
        found = figures(run.run_dir, finds_of(upstream))
    assert set(met["faults"]) == set(FAULTS), met
    assert (found["status"], found["steps"]) == ("completed", 6)
    assert (found["faults"], found["texts_out_of_place"], found["books_close"]) == ([], 0, True)
    assert found["groups_not_whole"] == 0 and found["train_groups"]["committed"] == 6 * 4
    assert found["observations"] > 100
    failed = {cause: n for cause, n in found["leases_returned"].items() if cause != "shutdown"}
    assert all(cause.startswith(("Retrieval", "BadReply")) for cause in failed), failed
    assert len(failed) > 1 and sum(failed.values()) > 5
    told = "".join(log.read_text() for log in (run.run_dir / "logs").glob("actor-*.log"))
    assert MARKER in told, "what happened is said where people look for it"

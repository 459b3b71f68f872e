"""A run that searches the live web, through the real command: its key is in no file of the run,
and to learn from it again, or to search as it did, asks nobody.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import load
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered
from retrieval_server.app.live.opening import open_live
from scripts.runs.books import Audit
from tests.integration.conftest import Run
from tests.integration.test_lag0 import forage
from tests.retrieval_server.app.live.providers_at_home import KEY, at_home

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SHORT = (
    *("learner.total_steps=1", "learner.eval_every=1", "learner.checkpoint_every=1"),
    *("learner.warmup_steps=0", "questions.eval_limit=2"),
    *("actors.count=1", "replay.groups_per_step=2", "replay.drop_no_signal=false"),
    *("retrieval.kind=serper", "retrieval.corpus="),
)


@pytest.mark.timeout(500)
async def test_a_live_run_keeps_its_key_to_itself_and_is_learnt_again_for_nothing(
    launch: Callable[..., Run], tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    live = {"key_file": key_file, "price_usd": 0.01, "budget_usd": 100, "requests_per_s": 1000}
    with at_home("serper") as home:
        home.script = [(429, {"retry-after": "0"}, {"message": f"slower, {KEY}"})]
        given = [f"retrieval.live.{name}={value}" for name, value in live.items()]
        run = launch(*SHORT, f"retrieval.live.url={home.url}", *given)
        assert run.wait(400) == 0, "".join(run.lines) + run.logs()
        asked = len(home.requests)
        log = run.run_dir / "events.log"
        queries = searched(log)
        assert asked > 1 and home.billed == asked - 1 and queries <= set(home.requests)
        forage("relearn", run.run_dir)
        record = f"retrieval.live.replay={run.run_dir}/live/answers.jsonl"
        again = load(
            run.run_dir / "config.yaml",
            [f"run_dir={tmp_path / 'again'}", "retrieval.live.key_file=", record],
        )
        async with open_live(again) as replayed:
            rows = await replayed.search(sorted(queries), 3, time.monotonic() + 60.0)
        assert len(rows) == len(queries) and all(rows)
        assert len(home.requests) == asked
    books = Audit()
    books.fold(log)
    assert books.fault_count == 0, books.summary()
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"events.log", "answers.jsonl", "spending.jsonl", "retrieval_server.log"} <= names
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in "".join(run.lines)


def searched(log: Path) -> set[str]:
    """What the rollouts of a log asked for."""
    rollouts = [
        decode_trajectory(each.payload) for each in read(log) if isinstance(each, Delivered)
    ]
    return {
        search.query for rollout in rollouts for turn in rollout.turns for search in turn.searches
    }

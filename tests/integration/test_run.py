"""End to end, through the real command: what a run leaves, and how it ends."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.runtime.process import socket_dir
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered, EvaluationFinished, GroupOpened, Sampled
from scripts.runs.books import Audit
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SHORT = [
    "learner.total_steps=6",
    "learner.eval_every=3",
    "learner.checkpoint_every=3",
    "questions.columns.source=hops",
    "questions.eval_limit=10",
    "rewards.evaluated=format",
    "learner.best=2/format",
    "replay.groups_per_step=4",
]
TAGS = {
    *("eval/em", "eval/1/em", "eval/2/sampled_em", "eval/2/format", "eval/f1"),
    *("eval/sampled_em", "actor/reward", "actor/searches_per_rollout"),
    *("actor/malformed_fraction", "learner/loss", "learner/behaviour_ratio_mean", "learner/ess"),
    *("learner/clip_fraction", "learner/entropy", "learner/grad_norm", "learner/wait_for_batch_s"),
    *("learner/wait_for_oldest_s", "replay/staleness", "replay/ready_groups"),
    *("sync/generation_pause_s", "sync/publish_s", "actor/tokens_per_s"),
    *("retrieval/latency_p50_s", "retrieval/latency_p99_s", "retrieval/servers_up"),
    *("actor/capacity", "actor/kv_use_max", "actor/prefix_hit_rate", "actor/queued_requests"),
    *("actor/running_requests", "actor/preemptions_total", "sync/prefilled_again_tokens_total"),
}


def scalars(run_dir: Path) -> EventAccumulator:
    """The run's TensorBoard scalars."""
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def test_a_run_completes_and_leaves_what_it_says(launch: Callable[..., Run]) -> None:
    check_whole(launch(*SHORT))


@pytest.mark.soak("runs")
def test_so_does_one_of_two_ranks_and_another_evaluates_what_it_leaves(
    launch: Callable[..., Run],
) -> None:
    run = launch(*SHORT, "learner.ranks=2", "learner.zero_stage=3")
    check_whole(run)
    again = launch(
        f"model.path={run.run_dir}/checkpoints/step-6/model",
        "learner.total_steps=0",
        "questions.eval_limit=20",
        name="evaluation",
    )
    assert again.wait(300) == 0, "".join(again.lines) + again.logs()
    evaluated = json.loads((again.run_dir / "summary.json").read_text())
    assert evaluated["steps"] == 0 and evaluated["em_final"] is not None


def check_whole(run: Run) -> None:
    """It completes; its summary, scalars, checkpoints and log say what happened."""
    assert run.wait(400) == 0, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 6)
    assert summary["retrieval_errors"] == summary["lost_requests"] == 0
    assert summary["retrieval_requests"] > 0
    assert 0 <= summary["staleness_max"] <= summary["max_staleness"]
    assert set(summary["em_final_by_hops"]) == {"1", "2"} and summary["eval_questions"] == 20
    assert {name: told["questions"] for name, told in summary["eval_sets"].items()} == {
        "1": 10,
        "2": 10,
    }
    scores = json.loads((run.run_dir / "evaluations.json").read_text())
    assert scores.keys() == {"0", "3", "6"} and "2/format" in scores["6"]["greedy"]
    assert (run.run_dir / "checkpoints" / "best" / "model").is_dir()
    events = scalars(run.run_dir)
    assert set(events.Tags()["scalars"]) >= TAGS
    assert max(point.value for point in events.Scalars("sync/probe_error")) <= 1e-4
    for part in ("model", "ema"):
        assert (run.run_dir / "checkpoints" / "step-6" / part / "model.safetensors").is_file()
    assert (run.run_dir / "curve.png").is_file()
    assert run.leftovers(5.0) == [] and not socket_dir(str(run.run_dir)).exists()
    check_log(run.run_dir)
    check_versions(run.run_dir, summary)


def check_log(run_dir: Path) -> None:
    """Whole train groups, each trained once; every token knows its version, none newer than
    possible.
    """
    kinds, delivered, trained = {}, {}, []
    for record in read(run_dir / "events.log"):
        if isinstance(record, GroupOpened):
            kinds[record.group_id] = record.kind
        elif isinstance(record, Delivered):
            delivered.setdefault(record.group_id, []).append(decode_trajectory(record.payload))
        elif isinstance(record, Sampled):
            trained += record.group_ids
            for group_id in record.group_ids:
                assert kinds[group_id] == "train" and len(delivered[group_id]) == 8
                for trajectory in delivered[group_id]:
                    assert record.step - 1 - 2 <= trajectory.oldest_version
                    assert trajectory.newest_version <= record.step - 1
    assert len(trained) == len(set(trained)) == 6 * 4
    books = Audit()
    books.fold(run_dir / "events.log")
    assert books.faults == []


def check_versions(run_dir: Path, summary: dict[str, Any]) -> None:
    """The first and the last version served, and in between no fewer than staleness 2 forces: one
    of three is enough. Each that was published arrived, was overtaken, or is on its way.
    """
    spans, seen = {}, set()
    for record in read(run_dir / "events.log"):
        if isinstance(record, EvaluationFinished):
            spans[record.result.step] = (record.result.oldest_version, record.result.newest_version)
        elif isinstance(record, Delivered):
            turns = decode_trajectory(record.payload).turns
            seen |= {int(version) for turn in turns for version in turn.policy_versions}
    assert (spans[0], spans[6]) == ((0, 0), (6, 6)) and spans.keys() == {0, 3, 6}
    assert len(seen) >= 3
    # Told by heartbeats: of the last version it may have come too late.
    assert summary["weight_syncs"] >= 2
    events = scalars(run_dir)
    made, overtaken = (events.Scalars(f"sync/{name}") for name in ("updates", "overtaken"))
    for one, other in zip(made, overtaken, strict=True):
        # At step s there are s + 1 versions: one may be under way and one may wait.
        assert one.step == other.step and abs(one.value + other.value - one.step) <= 1


@pytest.mark.soak("runs")
def test_ctrl_c_drains_and_leaves_nothing(launch: Callable[..., Run]) -> None:
    run = launch(*SHORT, "learner.total_steps=500")
    run.wait_for("step    2/", 300)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(180) == 130, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted" and "SIGINT" in summary["cause"]
    assert list((run.run_dir / "checkpoints").iterdir()), "the learner checkpoints on its way out"
    assert run.leftovers(5.0) == []


@pytest.mark.soak("runs")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("actor-0", "its engine"),
        ("replay", "replay.worker"),
        ("learner", "learner.worker"),
    ],
)
def test_a_killed_process_ends_the_run_with_its_cause(
    launch: Callable[..., Run], name: str, words: str
) -> None:
    run = launch(*SHORT, "learner.total_steps=500", "fleet.restarts=0")
    run.wait_for("step    1/", 300)
    pid = run.engine_of(name) if words == "its engine" else run.pid_of(words)
    os.kill(pid, signal.SIGKILL)
    assert run.wait(120) == 1, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["cause"].startswith(name), summary["cause"]
    assert run.leftovers(10.0) == []


def kill_launcher(run: Run) -> None:
    """SIGKILL: nothing of the run survives it."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    ports = listening({member.pid for member in family})
    assert len(family) > 10 and ports
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()

    def left() -> list[object]:
        found: list[object] = [member for member in family if living(member)]
        found += ports & listening(None)
        found += [path for path in (socket_dir(str(run.run_dir)),) if path.exists()]
        return found

    end = time.monotonic() + 30.0
    while left() and time.monotonic() < end:
        time.sleep(0.2)
    assert left() == []


def living(member: psutil.Process) -> bool:
    """Whether it runs still, and is not just waiting to be reaped."""
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening(pids: set[int] | None) -> set[tuple[str, int]]:
    """Addresses that these processes (None: any) listen on."""
    found = psutil.net_connections("tcp")
    return {
        tuple(c.laddr) for c in found if c.status == "LISTEN" and (pids is None or c.pid in pids)
    }


@pytest.mark.soak("runs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_starting_is_an_interruption(
    launch: Callable[..., Run], number: signal.Signals
) -> None:
    run = launch(*SHORT)
    run.wait_for("starting engines", 120)
    time.sleep(4.0 if number == signal.SIGINT else 12.0)
    os.kill(run.process.pid, number)
    assert run.wait(120) == 130, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted" and number.name in summary["cause"]
    assert run.leftovers(5.0) == []

"""Runs that were killed go on, to the bit where they would have gone."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.load import ConfigError, load
from configs.runtime.files import MOST_IDS
from learner.batch import build_shares
from learner.trainer import Trainer
from replay.log.event_log import read
from replay.log.records import (
    CaughtUp,
    Delivered,
    GroupDropped,
    GroupOpened,
    LearnerResumed,
    Leased,
    Record,
    Reported,
    Resampled,
    RunResumed,
    Sampled,
    StepsCommitted,
)
from replay.protocol import Batch
from scripts.fleet import resume
from scripts.runs.books import Audit
from tests.integration.conftest import Run
from tests.integration.test_run import kill_launcher

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

TOTAL, EVERY, KILLED_AFTER = 16, 5, 8
SETTINGS = [
    f"learner.total_steps={TOTAL}",
    f"learner.checkpoint_every={EVERY}",
    "learner.eval_every=10",
    "questions.eval_limit=20",
    "replay.groups_per_step=4",
    "fleet.restarts=0",
]


def kill_learner(run: Run) -> None:
    """SIGKILL: the run ends with that as its cause."""
    os.kill(run.pid_of("learner.worker"), signal.SIGKILL)
    assert run.wait(120) == 1, "".join(run.lines) + run.logs()
    cause = json.loads((run.run_dir / "summary.json").read_text())["cause"]
    assert cause.startswith("learner was killed by SIGKILL"), cause


@pytest.fixture(
    params=[
        (kill_launcher, "actors.count=1"),  # the demo's own, which starts sooner
        pytest.param((kill_learner, "actors.count=2"), marks=pytest.mark.soak("resume")),
    ],
    ids=["kill_launcher", "kill_learner"],
)
def resumed(launch: Callable[..., Run], request: pytest.FixtureRequest) -> Path:
    """The directory of a run that was killed after step 8 and then resumed."""
    kill, actors = request.param
    run = launch(*SETTINGS, actors)
    run.wait_for(f"step {KILLED_AFTER:>4}/", 900)
    kill(run)
    again = launch(resume=True)
    assert again.wait(900) == 0, "".join(again.lines) + again.logs()
    assert run.leftovers(5.0) == again.leftovers(5.0) == []
    return run.run_dir


def test_a_killed_run_is_resumed_to_the_bit(resumed: Path) -> None:
    records = list(read(resumed / "events.log"))
    check_history(resumed, records, TOTAL)
    check_order(records)
    check_what_is_left(resumed)
    losses = {r.step: r.gauges["learner/loss"] for r in records if isinstance(r, Reported)}
    assert sorted(losses) == list(range(1, TOTAL + 1))
    assert relearned(resumed, records) == losses


@pytest.mark.soak("resume")
def test_whoever_is_killed_the_run_goes_on_and_may_grow(launch: Callable[..., Run]) -> None:
    run = launch(*SETTINGS, "learner.total_steps=12")
    run.wait_for("step    2/", 300)
    with pytest.raises(ConfigError, match="it is still running"):
        resume.checked(str(run.run_dir), None, [])
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait(60)
    run = launch(resume=True)
    run.wait_for("step  ", 300)
    os.kill(run.pid_of("replay.worker"), signal.SIGKILL)
    assert run.wait(120) == 1
    assert launch(resume=True).wait(300) == 0
    with pytest.raises(ConfigError, match="nothing to continue"):
        resume.checked(str(run.run_dir), None, [])
    run = launch("learner.total_steps=14", resume=True)
    assert run.wait(300) == 0, "".join(run.lines) + run.logs()
    check_history(run.run_dir, list(read(run.run_dir / "events.log")), 14)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["launches"]) == ("completed", 14, 4)
    assert summary["em_final"] is not None and run.leftovers(5.0) == []


def check_history(run_dir: Path, records: list[Record], total: int) -> None:
    """Each step has one batch, each group trains once, and none was too old."""
    sampled = [record for record in records if isinstance(record, Sampled)]
    assert [record.step for record in sampled] == list(range(1, total + 1))
    trained = [group_id for record in sampled for group_id in record.group_ids]
    dropped = {record.group_id for record in records if isinstance(record, GroupDropped)}
    assert len(trained) == len(set(trained)) == 4 * total and not dropped & set(trained)
    books = Audit()
    books.fold(run_dir / "events.log")
    assert books.faults == [] and 0 <= books.staleness_max <= 2


def check_order(records: list[Record]) -> None:
    """The recorded batches first, in order; then verified weights; only then leases."""
    start = next(i for i, record in enumerate(records) if isinstance(record, RunResumed))
    last = max(r.step for r in records[:start] if isinstance(r, Sampled))
    later = records[start:]
    (resume,) = (r for r in later if isinstance(r, LearnerResumed))
    # It may have made another checkpoint before it was killed, perhaps without a word to replay.
    told = max(r.step for r in records[:start] if isinstance(r, StepsCommitted))
    assert EVERY <= told <= resume.step <= last and resume.step % EVERY == 0
    assert resume.incarnation == 2 and last >= KILLED_AFTER
    quiet = list(takewhile(lambda record: not isinstance(record, CaughtUp), later))
    assert not [r for r in quiet if isinstance(r, Leased | GroupOpened | Sampled)]
    served = [r.step for r in quiet if isinstance(r, Resampled)]
    reported = [r.step for r in quiet if isinstance(r, Reported)]
    assert served == reported == list(range(resume.step + 1, last + 1))
    opened = [r for r in later if isinstance(r, GroupOpened)]
    assert {r.incarnation for r in opened} == {2} and opened[0].version >= last


def check_what_is_left(run_dir: Path) -> None:
    """The summary, TensorBoard and the checkpoints of a run that was launched twice."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["launches"]) == ("completed", TOTAL, 2)
    assert summary["trajectories_trained"] == 4 * 8 * TOTAL and summary["staleness_max"] <= 2
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("learner/loss")] == list(range(1, TOTAL + 1))
    assert [e.step for e in events.Scalars("eval/em")] == [0, 10, TOTAL]
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert {"best", "step-16", "step-15", "step-10"} <= names


def relearned(run_dir: Path, records: list[Record]) -> dict[int, float]:
    """The losses of an undisturbed learner on the same log, from the starting weights."""
    config = load(run_dir / "config.yaml")
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    trainer = Trainer(config)
    losses = {
        batch.step: trainer.learn(build_shares(batch, config.learner, vocabulary=MOST_IDS))[
            "learner/loss"
        ]
        for batch in batches(records)
    }
    trainer.close()
    return losses


def batches(records: list[Record]) -> Iterator[Batch]:
    """The log's batches, in order."""
    payloads: dict[int, dict[int, bytes]] = {}
    versions: dict[int, int] = {}
    for record in records:
        if isinstance(record, GroupOpened):
            versions[record.group_id] = record.version
        elif isinstance(record, Delivered):
            payloads.setdefault(record.group_id, {})[record.sibling] = record.payload
        elif isinstance(record, Sampled):
            ids = record.group_ids
            groups = tuple(tuple(payloads[i][n] for n in sorted(payloads[i])) for i in ids)
            yield Batch(record.step, ids, tuple(versions[i] for i in ids), groups, {}, {}, ())

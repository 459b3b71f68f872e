"""Runs of the demo task whose rollouts are a program's, through the real command."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.runtime.process import REPOSITORY
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered, Sampled
from scripts.runs.books import Audit
from tests.integration import misbehaving
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SHORT = ["learner.total_steps=2", "learner.eval_every=2", "questions.eval_limit=10"]


def program_of(path: Path) -> list[str]:
    """The settings of a program that is a file's function `answer`."""
    return [
        "environment.name=program",
        f"environment.program.entry_point={path}:answer",
        "actors.shuffle_passages=false",
    ]


def curve(run_dir: Path, tag: str) -> list[float]:
    """A gauge of TensorBoard's, over the run."""
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [each.value for each in events.Scalars(tag)]


@pytest.mark.timeout(500)
def test_programs_are_trained_whatever_some_of_them_do_and_the_books_close(
    launch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = tmp_path / "claimed"
    claimed.mkdir()
    monkeypatch.setenv("CLAIMED", str(claimed))
    run = launch(
        *program_of(Path(misbehaving.__file__)),
        *("environment.program.variables=[CLAIMED]", "environment.program.deadline_s=20"),
        *(*SHORT, "replay.groups_per_step=2", "actors.count=1"),
    )
    assert run.wait(400) == 0, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    assert summary["retrieval_requests"] > 0 == summary["lost_requests"]
    books, log = Audit(), run.run_dir / "events.log"
    books.fold(log)
    assert books.fault_count == 0, books.summary()
    facts = list(read(log))
    delivered = [each for each in facts if isinstance(each, Delivered)]
    rollouts = [decode_trajectory(each.payload) for each in delivered]
    assert any(rollout.search_count for rollout in rollouts)
    assert any(rollout.answer for rollout in rollouts)
    of_groups = Counter(each.group_id for each in delivered)
    trained = [number for each in facts if isinstance(each, Sampled) for number in each.group_ids]
    assert len(trained) == 4 and {of_groups[number] for number in trained} == {8}
    done = {each.name: each.read_text() for each in claimed.iterdir()}
    assert done.keys() == set(misbehaving.WAYS) and done["megabyte"] == "413"
    assert done["call_later"] in ("", "410")  # killed before, or refused
    assert curve(run.run_dir, "actor/merged_whole")[-1] > 0.5
    assert curve(run.run_dir, "actor/programs_failed_total")[-1] > 0
    assert run.leftovers(5.0) == []
    left = [each.pid for each in psutil.process_iter() if says(each, str(claimed))]
    assert left == []


def says(process: psutil.Process, text: str) -> bool:
    """True for a process of ours that has this folder in its environment."""
    with suppress(psutil.Error):
        return process.environ().get("CLAIMED") == text
    return False


@pytest.mark.soak("programs")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "least", "whole"),
    [("search_with_openai", 0.90, 0.9), ("summarise_half_way", 0.80, 0.0)],
)
def test_the_demo_is_learnt_by_a_program(
    launch: Callable[..., Run], name: str, least: float, whole: float
) -> None:
    in_one = ["actors.count=1", "actors.rollouts_in_flight=256", "actors.max_num_seqs=256"]
    program = program_of(REPOSITORY / "examples" / f"{name}.py")
    run = launch(*program, *in_one, "learner.total_steps=20")
    assert run.wait(1700) == 0, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 20)
    assert summary["em_final"] >= least, summary
    assert summary["token_mismatches"] == summary["lost_requests"] == 0
    assert whole <= summary["merged_whole"] <= 1.0, summary
    books = Audit()
    books.fold(run.run_dir / "events.log")
    assert books.fault_count == 0, books.summary()
    assert run.leftovers(5.0) == []

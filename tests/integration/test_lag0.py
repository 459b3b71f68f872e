"""Asynchronous training without lag is synchronous training, to the bit; so is learning again from
what was recorded.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.process import REPOSITORY
from replay.log.history import Recording
from tests.children import ends_with_us
from tests.integration.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 3
WHOLE = {"model": "model", "ema": "model"}  # folders of a checkpoint, and the files of weights
SHORT = [
    f"learner.total_steps={STEPS}",
    f"learner.checkpoint_every={STEPS}",
    "learner.eval_every=2",  # evaluations in between must change nothing
    "learner.warmup_steps=1",
    "questions.eval_limit=2",
    "replay.groups_per_step=3",
    "replay.group_size=4",
]
CRITIC = [
    "learner.baseline=critic",
    "learner.advantage_std=whiten",
    "learner.critic.lr=1e-3",
    "learner.critic.gae_lambda=0.9",
]
LORA = ["learner.lora.rank=4"]
NOTHING_BATCHED = [
    "actors.max_num_seqs=1",
    "actors.prefix_caching=false",
    "replay.max_staleness=0",
]


def forage(*words: object) -> str:
    """Run a command to its end; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.cli", *map(str, words)],
        cwd=REPOSITORY,
        env=ends_with_us(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def completed(run: Run) -> Path:
    """The run's directory once it has completed."""
    assert run.wait(500) == 0, "".join(run.lines) + run.logs()
    return run.run_dir


def losses(run_dir: Path) -> list[float]:
    """What `forage sync` computed."""
    found: list[float] = json.loads((run_dir / "summary.json").read_text())["losses"]
    return found


def reported(run_dir: Path) -> list[float]:
    """What the learner of an asynchronous run reported."""
    reports = Recording.of(run_dir).reports
    return [reports[step]["learner/loss"] for step in range(1, STEPS + 1)]


def check_same(asynchronous: Path, synchronous: Path, files: Mapping[str, str] = WHOLE) -> None:
    """Every loss and every final weight is the same, and training did change something."""
    assert reported(asynchronous) == losses(synchronous)
    assert len(set(losses(synchronous))) == STEPS
    for part, name in files.items():
        ours, theirs = (
            load_file(folder / "checkpoints" / f"step-{STEPS}" / part / f"{name}.safetensors")
            for folder in (asynchronous, synchronous)
        )
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def state_of(run_dir: Path, kind: str) -> dict[str, torch.Tensor]:
    """The last masters, moments and averages of a run."""
    state = load_file(run_dir / "checkpoints" / f"step-{STEPS}" / kind / "rank-0.safetensors")
    return {name: value for name, value in state.items() if not name.startswith("rank/")}


@pytest.mark.timeout(1000)
def test_without_lag_and_batching_it_is_the_synchronous_trainer(
    launch: Callable[..., Run], tmp_path: Path
) -> None:
    asynchronous = completed(launch(*SHORT, *NOTHING_BATCHED))
    synchronous = tmp_path / "sync"
    forage("sync", asynchronous / "config.yaml", f"run_dir={synchronous}")
    check_same(asynchronous, synchronous)


@pytest.mark.soak("resume")
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("on", "kind", "head"),
    [("copy", "critic", "head.weight"), ("policy", "state", "value_head.weight")],
)
def test_with_a_critic_it_is_too(
    launch: Callable[..., Run], tmp_path: Path, on: str, kind: str, head: str
) -> None:
    how = f"learner.critic.on={on}"
    asynchronous = completed(launch(*SHORT, *NOTHING_BATCHED, *CRITIC, how))
    synchronous = tmp_path / "sync"
    forage("sync", asynchronous / "config.yaml", f"run_dir={synchronous}")
    check_same(asynchronous, synchronous)
    ours, theirs = state_of(asynchronous, kind), state_of(synchronous, kind)
    assert ours.keys() == theirs.keys() and f"master/{head}" in ours
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert ours[f"master/{head}"].any()


@pytest.mark.soak("resume")
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_with_an_adapter_it_is_too(
    launch: Callable[..., Run], tmp_path: Path, publish: str
) -> None:
    how = f"learner.lora.publish={publish}"
    asynchronous = completed(launch(*SHORT, *NOTHING_BATCHED, *LORA, how))
    synchronous = tmp_path / "sync"
    forage("sync", asynchronous / "config.yaml", f"run_dir={synchronous}")
    check_same(asynchronous, synchronous, {"model": "model", "adapter": "adapter_model"})


@pytest.mark.soak("resume")
@pytest.mark.timeout(1000)
def test_what_a_batching_run_recorded_gives_its_losses_again(
    launch: Callable[..., Run], tmp_path: Path
) -> None:
    run = completed(launch(*SHORT))
    again = tmp_path / "again"
    forage("sync", run / "config.yaml", f"run_dir={again}", "--recorded", run)
    check_same(run, again)
    check_relearnt(run)


def check_relearnt(run: Path) -> None:
    """`forage relearn` repeats the losses under the recorded settings, and not under others."""
    output = forage("relearn", run, "--json", run / "relearnt.json")
    assert f"{STEPS} of {STEPS} losses are those that the run reported" in output
    relearnt = rows(run / "relearnt.json")
    assert [row["loss"] for row in relearnt] == reported(run)
    assert (run / "relearn-recorded" / "relearn.png").stat().st_size > 0
    forage("relearn", run, "learner.objective=cispo", "--steps", 2)
    cispo = rows(run / "relearn-objective=cispo" / "steps.json")
    assert len(cispo) == 2 and cispo[1]["loss"] != relearnt[1]["loss"]


def rows(path: Path) -> list[dict[str, Any]]:
    """The steps in a file that `forage relearn` left."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["steps"]
    return found

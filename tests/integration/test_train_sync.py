"""The synchronous trainer, through its real command."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from configs.runtime.process import REPOSITORY
from scripts.demo.task import DemoFiles
from tests.children import ends_with_us
from tests.integration.conftest import line_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture
def start(demo_files: DemoFiles, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start(*overrides): the command on the demo task, in `tmp_path / "run"`."""
    begun: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        words = [
            str(Path(sys.executable).with_name("forage")),
            "sync",
            "configs/demo.yaml",
            f"run_dir={tmp_path / 'run'}",
            f"model.path={demo_files.model}",
            f"questions.train={demo_files.train}",
            f"questions.eval={demo_files.eval}",
            f"retrieval.corpus={demo_files.corpus}",
            "learner.warmup_steps=2",
            *overrides,
        ]
        pipe, env = subprocess.PIPE, ends_with_us()
        process = subprocess.Popen(
            words, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True, env=env
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.timeout(600)
def test_a_few_steps_learn_and_leave_a_checkpoint(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    run_dir, process = tmp_path / "run", start("learner.total_steps=12", "questions.eval_limit=80")
    said, errors = process.communicate(timeout=400)
    assert process.returncode == 0, said[-3000:] + errors[-3000:]
    log = run_dir / "engine.log"
    lines = [
        line for line in errors.splitlines() if not re.search(r" \(\d+ s\)$", line)
    ]  # progress
    assert lines == [f"starting the engine: what it says goes to {log}"] and log.stat().st_size
    first, last = (line for line in said.splitlines() if line.startswith("evaluation"))
    start = dict(each.split() for each in first.partition(": ")[2].split(", "))
    final = json.loads((run_dir / "summary.json").read_text())
    assert final["sampled_em"] > float(start["sampled_em"]) + 0.1, (first, last)
    assert (run_dir / "checkpoints" / "step-12" / "model" / "model.safetensors").is_file()


def engines_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The children that have become vLLM's engine."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [each for each in children if "EngineCore" in line_of(each)]


@pytest.mark.timeout(900)
def test_no_engine_outlives_the_killed_command(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("learner.total_steps=1000", "questions.eval_limit=80")
    while not engines_of(process):
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []

"""The synchronous trainer, through its real command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo_task import DemoFiles

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
ROOT = Path(__file__).resolve().parents[2]


def test_a_few_steps_learn_and_leave_a_checkpoint(demo_files: DemoFiles, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "scripts/train_sync.py", "configs/demo.yaml", f"run_dir={run_dir}"),
            *(f"model.path={demo_files.model}", f"retrieval.corpus={demo_files.corpus}"),
            *(f"questions.train={demo_files.train}", f"questions.eval={demo_files.eval}"),
            *("learner.total_steps=12", "questions.eval_limit=80", "learner.warmup_steps=2"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, last = (line for line in done.stdout.splitlines() if line.startswith("evaluation"))
    start = json.loads(first.partition(": ")[2].replace("'", '"'))
    final = json.loads((run_dir / "summary.json").read_text())
    assert final["sampled_em"] > start["sampled_em"] + 0.1, (first, last)
    assert (run_dir / "checkpoints" / "step-12" / "model" / "model.safetensors").is_file()

"""The demo under fire, through the real command, beside the same run undisturbed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.soak("chaos")]
COMMAND = os.environ.get("CHAOS", "-m tests.faults.chaos").split()


@pytest.mark.timeout(3600)
def test_fifteen_kills_and_five_stops_lose_and_repeat_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "chaos.json"
    command = [
        sys.executable,
        *COMMAND,
        "--kills=15",
        "--stops=5",
        f"--out={tmp_path / 'chaos'}",
        f"--json={figures}",
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=3500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert (found["kills"], found["stops"], found["status"]) == (15, 5, "completed")
    assert (found["lost"], found["trained_twice"], found["books_close"]) == (0, 0, True)
    assert found["steps"] >= 150 and abs(found["em_gap"]) < 0.1

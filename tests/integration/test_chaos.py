"""The demo under fire, through the real command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.mark.timeout(1500)
def test_two_kills_and_a_stop_lose_and_repeat_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "chaos.json"
    command = [
        sys.executable,
        "-m",
        "scripts.chaos",
        "--quick",
        "--alone",
        "--kills=2",
        "--steps=30",
        f"--out={tmp_path / 'chaos'}",
        f"--json={figures}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert (found["kills"], found["stops"], found["status"]) == (2, 1, "completed")
    assert (found["lost"], found["trained_twice"], found["books_close"]) == (0, 0, True)
    assert found["steps"] >= 30 and found["em_final"] > 0.5

"""The demo left alone among strangers for two halves of half an hour, through the real command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(3000)]
OUT = REPOSITORY / ".cache" / "weeks"  # the second half goes on with the run of the first


def half(number: int, figures: Path) -> dict[str, object]:
    """What a half came to, and all before it."""
    words = [f"--half={number}", f"--out={OUT}", f"--json={figures}"]
    command = [sys.executable, "-m", "tests.faults.weeks", *words]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=2900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(figures.read_text())
    return found


@pytest.mark.soak("weeks_first")
def test_half_an_hour_of_kills_and_attacks_loses_nothing_and_grows_nothing(tmp_path: Path) -> None:
    found = half(1, tmp_path / "half.json")
    assert (found["lost"], found["trained_twice"], found["books_close"]) == (0, 0, True)


@pytest.mark.soak("weeks_second")
def test_another_half_hour_of_the_same_run_does_neither(tmp_path: Path) -> None:
    found = half(2, tmp_path / "half.json")
    assert (found["lost"], found["trained_twice"], found["books_close"]) == (0, 0, True)
    assert found["broken"] == [] and len(found["halves"]) == 2

"""Nothing that tests start outlives a pytest that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from tests.children import carrying
from tests.integration.outlived import BEGUN

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
STARTED = (b"EngineCore", b"raylet", b"learner.worker", b"replay.worker", b"guardian", b"children")


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("demo_files")
@pytest.mark.parametrize(
    "workers", [("-n", "1"), pytest.param((), marks=pytest.mark.soak("runs"))], ids=["xdist", ""]
)
def test_a_killed_pytest_leaves_nobody(tmp_path: Path, workers: tuple[str, ...]) -> None:
    begun, said = tmp_path / "begun", tmp_path / "said"
    command = [sys.executable, "-m", "pytest", "tests/integration/outlived.py", "-s", *workers]
    with said.open("wb") as out:
        env = os.environ | {BEGUN: str(begun)}
        process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=out, stderr=out)
    end = time.monotonic() + 600
    while not begun.exists():
        assert process.poll() is None and time.monotonic() < end, said.read_text()[-5000:]
        time.sleep(0.2)
    family = b" ".join(carrying(f"{BEGUN}={begun}").values())
    assert [name for name in STARTED if name not in family] == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 60
    while (left := carrying(f"{BEGUN}={begun}")) and time.monotonic() < end:
        time.sleep(0.2)
    assert left == {}

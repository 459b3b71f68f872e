"""A run that `forage train --detach` has started goes on when the terminal is gone."""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from configs.runtime.process import Exit, socket_dir
from scripts.demo.task import DemoFiles
from scripts.fleet import guardian
from scripts.fleet.launch import FIRST
from tests.scripts.fleet.test_detach import lives
from tests.scripts.terminals import run_in_terminal

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]
TRAIN = ["-m", "scripts.cli", "train", "configs/demo.yaml", "--detach"]
DEADLINE_S = 300.0


def test_a_detached_run_goes_on_without_its_terminal_until_it_is_ended(
    demo_files: DemoFiles, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    files = (
        f"run_dir={run_dir}",
        f"model.path={demo_files.model}",
        f"questions.train={demo_files.train}",
        f"questions.eval={demo_files.eval}",
        f"retrieval.corpus={demo_files.corpus}",
    )
    code, said = run_in_terminal([*TRAIN, *files, "actors.count=0"])
    assert code == Exit.BAD_INPUT and "actors.count" in said and not run_dir.exists()
    code, said = run_in_terminal([*TRAIN, *files])
    assert code == Exit.DONE and "starting Ray and placing processes" in said, said
    pid = int(re.findall(r"kill -INT (\d+)", said)[0])
    launcher = psutil.Process(pid)
    assert launcher.terminal() is None
    log, end = run_dir / "launcher.log", time.monotonic() + DEADLINE_S
    while FIRST not in log.read_text() and lives(launcher) and time.monotonic() < end:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGINT)
    while lives(launcher) and time.monotonic() < end:
        time.sleep(0.1)
    said = log.read_text()
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted", said
    assert all(words in said for words in ("weights will travel by", FIRST, "by SIGINT"))
    assert "\x1b" not in said
    assert guardian.members(f"{socket_dir(str(run_dir)).name}-{pid}") == []

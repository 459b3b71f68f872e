"""The actor's process: exit codes, and an engine that never outlives it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from actors import worker
from configs.keys import Address
from configs.runtime.process import Exit
from configs.runtime.signals import MAKE_WAY
from tests.children import ends_with_us

Start = Callable[..., subprocess.Popen[str]]
slow = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run whose replay and learner do not exist."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\n"
        "model: {dtype: float32, max_model_len: 128}\n"
        "actors: {kv_cache_bytes: 67108864}\nretrieval: {port: 1}\n"
        f"replay: {{endpoint: 'ipc://{tmp_path}/replay', dead_after_s: 3, restart_deadline_s: 3}}\n"
        f"weight_sync: {{endpoint: 'ipc://{tmp_path}/sync'}}\n"
    )
    return path


@pytest.fixture
def start(config: Path) -> Iterator[Start]:
    """start(*overrides): an actor of that run."""
    begun: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "actors.worker", str(config), "--actor-id", "actor-0"]
        process = subprocess.Popen(
            [*command, *overrides], stderr=subprocess.PIPE, text=True, env=ends_with_us()
        )
        begun.append(process)
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/nowhere", "model.path = '/nowhere': no model there"),
        ("actors.thread=1", "did you mean 'actors.threads'?"),
        ("actors.engine.kv_cache_dtyp=fp8", "did you mean actors.engine.kv_cache_dtype?"),
        ("actors.kv_cache_bytes=0", "= 0: it is found when a run is prepared (forage train): give"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_message(
    config: Path,
    override: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("begin", "on_stop"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    assert worker.main([str(config), override, "--actor-id", "actor-0"]) == Exit.BAD_INPUT
    complaint = capsys.readouterr().err
    assert message in complaint and "Traceback" not in complaint


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    pytest.fail("".join(seen))


@slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_killed_actor_takes_its_engine_with_it(start: Start, tiny_model_path: Path) -> None:
    process = start(f"model.path={tiny_model_path}", "replay.restart_deadline_s=60")
    wait_for(process, "engine ready")
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("EngineCore" in child.name() for child in family)
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


@slow
@pytest.mark.soak("fleet")
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_silent_replay_ends_the_actor_by_name(start: Start, tiny_model_path: Path) -> None:
    process = start(f"model.path={tiny_model_path}")
    wait_for(process, "engine ready")
    family = psutil.Process(process.pid).children(recursive=True)
    begun = time.monotonic()
    _, complaint = process.communicate(timeout=100)
    assert process.returncode == Exit.CONSEQUENCE and "actor-0: ReplayTimeout: " in complaint
    assert "Traceback" not in complaint and time.monotonic() - begun < 90
    assert not psutil.wait_procs(family, timeout=30)[1]


@slow
@pytest.mark.soak("fleet")
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_sigterm_drains_and_exits_0(start: Start, tiny_model_path: Path) -> None:
    process = start(f"model.path={tiny_model_path}", "replay.restart_deadline_s=60")
    wait_for(process, "waiting for the first weights")
    process.terminate()
    _, log = process.communicate(timeout=120)
    assert process.returncode == 0 and "drained: SIGTERM" in log


async def test_a_signal_to_make_way_is_not_one_to_drain() -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    runner: Any = SimpleNamespace(
        stop=lambda cause: heard.put_nowait(f"stop: {cause}"),
        make_way=lambda cause: heard.put_nowait(f"make way: {cause}"),
    )
    worker._stop_on_signals(runner)
    try:
        for number, said in ((signal.SIGTERM, "stop: SIGTERM"), (MAKE_WAY, "make way: SIGUSR1")):
            os.kill(os.getpid(), number)
            assert await asyncio.wait_for(heard.get(), 10.0) == said
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, MAKE_WAY):
            asyncio.get_running_loop().remove_signal_handler(number)


def test_only_the_launcher_s_actors_beside_the_learner_have_gpus_in_its_plan() -> None:
    here, elsewhere = Address("ipc:///tmp/run/weights", None), Address("tcp://192.0.2.1:5556", None)
    assert worker._planned("actor-3", here) == 3
    assert worker._planned("actor-3", elsewhere) is None
    assert worker._planned("node-2-4711", here) is None  # it has joined by hand

"""Supervisors and wardens that hang are ended and replaced; imports that cannot be forked are
refused.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from actors.errors import ProgramFailed
from actors.gateway import program, supervisor_process
from actors.gateway.program import Programs, check, result_of
from configs.environment import EnvironmentConfig, ProgramConfig
from configs.load import ConfigError
from configs.schema import Config
from tests.actors.gateway.programs import QUESTION, living, run

Settings = Callable[..., ProgramConfig]
ANSWER = "\ndef answer(question):\n    return 'x'\n"


def refusal(settings: ProgramConfig) -> str:
    with pytest.raises(ConfigError) as raised:
        check(Config(environment=EnvironmentConfig(name="program", program=settings)))
    return str(raised.value)


@pytest.mark.slow
def test_an_import_that_leaves_threads_is_refused(entered: Settings) -> None:
    source = "import threading, time\ndef tell():\n    while True:\n        print('x' * 999)\n"
    source += "threading.Thread(target=tell, name='teller', daemon=True).start()"
    said = refusal(entered(source + ANSWER))
    assert "environment.program.entry_point = " in said
    assert "leaves threads running (teller)" in said and "begin threads in the function" in said


async def test_one_that_joins_them_is_not(entered: Settings) -> None:
    source = "import threading\nthreading.Timer(0.1, print, ['done']).start()\nprint('loaded')"
    assert result_of(await run(entered(source + ANSWER))).answer == "x"


def test_an_import_that_takes_all_memory_is_refused(entered: Settings) -> None:
    source = "import mmap; HELD = mmap.mmap(-1, 700 << 20)"
    said = refusal(entered(source + ANSWER, memory_mb=600))
    assert "MB of address space, which leaves a program nothing of" in said
    assert "environment.program.memory_mb = 600" in said
    check(Config(environment=EnvironmentConfig(name="program", program=entered(source + ANSWER))))


@pytest.mark.slow
async def test_a_stopped_supervisor_is_replaced(
    written: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_BEGUN_WITHIN_S", 3.0)
    monkeypatch.setattr(supervisor_process, "_CLOSED_WITHIN_S", 0.5)
    async with Programs(written("print('{}')")) as programs:
        assert (await programs.run(QUESTION, {})).status == 0
        supervisor = supervisor_of()
        supervisor.suspend()
        with pytest.raises(ProgramFailed, match="not begun within 3 s"):
            await programs.run(QUESTION, {})
        assert (await programs.run(QUESTION, {})).status == 0
        (second := supervisor_of()).suspend()
        assert second != supervisor
    assert not supervisor.is_running() and not second.is_running()


@pytest.mark.slow
async def test_a_stopped_warden_is_ended_with_its_program_alone(
    entered: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_TOLD_WITHIN_S", 0.5)
    sleeper = f"[sys.executable, '-c', 'import time; time.sleep(66)', '{tmp_path}/s']"
    source = "import json, os, signal, subprocess, sys, time\ndef answer(question):\n"
    source += "    if question['stops']:\n"
    source += f"        subprocess.Popen({sleeper}, start_new_session=True)\n"
    source += "        os.kill(os.getppid(), signal.SIGSTOP)\n        time.sleep(67)\n"
    source += "    return 'x'\n"
    async with Programs(entered(source, deadline_s=2.0, grace_s=0.1)) as programs:
        with pytest.raises(ProgramFailed, match=r"nobody told its end within 2\.6 s"):
            await programs.run('{"stops": true}', {})
        supervisor = supervisor_of()
        assert result_of(await programs.run('{"stops": false}', {})).answer == "x"
        assert supervisor_of() == supervisor
        ends = time.monotonic() + 10
        while living(f"{tmp_path}/s") or len(supervisor.children()):
            assert time.monotonic() < ends
            time.sleep(0.05)


@pytest.mark.slow
async def test_nothing_is_left_of_a_supervisor_and_a_warden_that_are_killed(
    written: Settings, tmp_path: Path
) -> None:
    sleeper = f"[sys.executable, '-c', 'import time; time.sleep(68)', '{tmp_path}']"
    source = "import os, signal, subprocess, sys\n"
    source += f"subprocess.Popen({sleeper}, start_new_session=True)\n"
    source += "over = int(open(f'/proc/{os.getppid()}/stat').read().split()[3])\n"
    source += "os.kill(over, signal.SIGKILL); os.kill(os.getppid(), signal.SIGKILL)\n"
    async with Programs(written(source)) as programs:
        with pytest.raises(ProgramFailed, match="what supervises it was killed"):
            await programs.run(QUESTION, {})
    assert living(str(tmp_path)) == []


@pytest.mark.slow
async def test_a_supervisor_ends_what_a_killed_actor_leaves_stopped(
    entered: Settings, tmp_path: Path
) -> None:
    source = "import os, signal, time\ndef answer(question):\n"
    source += f"    open('{tmp_path}/begun', 'w').close()\n"
    source += "    os.kill(os.getppid(), signal.SIGSTOP)\n    time.sleep(69)\n"
    settings = entered(source, grace_s=0.1)
    actor = tmp_path / "actor.py"
    actor.write_text(
        "import asyncio\nfrom actors.gateway.program import Programs\n"
        "from configs.environment import ProgramConfig\n"
        f"settings = ProgramConfig(entry_point={settings.entry_point!r}, grace_s=0.1)\n"
        "asyncio.run(Programs(settings).run('{}', {}))\n"
    )
    process = psutil.Popen([sys.executable, str(actor)], env={**os.environ})
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    family = process.children(recursive=True)
    assert len(family) == 3  # supervisor, warden, program
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert psutil.wait_procs(family, timeout=20)[1] == []


def supervisor_of() -> psutil.Process:
    """The supervisor that this process has started last."""
    found = [
        each
        for each in psutil.Process().children()
        if each.status() != psutil.STATUS_ZOMBIE
        and "actors.gateway.supervisor" in " ".join(each.cmdline())
    ]
    return max(found, key=lambda each: each.create_time())

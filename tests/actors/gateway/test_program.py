"""Programs that misbehave are ended, named, and leave nothing behind."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from actors.errors import ProgramFailed
from actors.gateway.program import Ended, Programs, check, result_of
from configs.environment import EnvironmentConfig, ProgramConfig
from configs.load import ConfigError
from configs.schema import Config
from tests.actors.gateway.programs import QUESTION, living, run

Settings = Callable[..., ProgramConfig]


async def test_a_program_reads_its_question_and_prints_its_answer(written: Settings) -> None:
    source = "import json,os,sys; q = json.load(sys.stdin); print('noise'); "
    source += "print(json.dumps({'answer': q['id'] + os.environ['OPENAI_API_KEY'], 'reward': .5}))"
    ended = await run(written(source), OPENAI_API_KEY="-key")
    assert (ended.cause, ended.status, ended.left) == ("ended", 0, 0)
    result = result_of(ended)
    assert (result.answer, result.reward) == ("q-1-key", 0.5)


async def test_it_has_a_folder_of_its_own_and_none_of_the_actor_s_secrets(
    written: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("TOOL_KEY", "handed on")
    source = "import os; print(os.getcwd(), os.listdir()); print(dict(os.environ)); "
    source += "open('left', 'w').write('x'); print('{}')"
    ended = await run(written(source, variables=("TOOL_KEY",)))
    where, environment, _ = ended.output.splitlines()
    assert "/forage-programs-" in where and where.endswith(" []")
    assert not Path(where.split()[0]).exists()
    assert "s3cret" not in environment and "handed on" in environment


async def test_an_entry_point_is_imported_once_and_called_for_each(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "import os\nHOME = os.getpid()\nasync def answer(question):\n"
        "    return f\"{question['id']} {os.getppid() != HOME} {HOME}\"\n"
    )
    async with Programs(ProgramConfig(entry_point=f"{path}:answer")) as programs:
        ended = await asyncio.gather(*(programs.run(QUESTION, {}) for _ in range(5)))
    answers = {result_of(each).answer for each in ended}
    assert len(answers) == 1 and str(answers.pop()).startswith("q-1 True ")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return 7", 1, "TypeError: it returned 7: return a text, a dict"),
        ("raise RuntimeError('no luck')", 1, "RuntimeError: no luck"),
        ("import os; os.kill(os.getpid(), 11)", -11, "signal 11"),
        ("import sys; sys.exit('enough')", 1, "enough"),
    ],
)
async def test_a_function_that_fails_is_named(
    tmp_path: Path, body: str, status: int, said: str
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(f"def answer(question):\n    {body}\n")
    settings = ProgramConfig(entry_point=f"{path}:answer")
    ended = await run(settings)
    assert ended.status == status and said in ended.fault(settings)


TRACEBACK = """earlier words
Traceback (most recent call last):
  File "/opt/agent/run.py", line 8, in <module>
    ask()
    ~~~^^
  File "/opt/lib/openai/client.py", line 99, in ask
    raise KeyError("nope")
KeyError: 'nope'
"""


@pytest.mark.parametrize(
    ("settings", "errors", "place"),
    [
        (ProgramConfig(command=("python3", "/opt/agent/run.py")), TRACEBACK, " (run.py:8)"),
        (ProgramConfig(entry_point="agents.run:answer"), TRACEBACK, " (run.py:8)"),
        (ProgramConfig(entry_point="/opt/agent/run.py:answer"), TRACEBACK, " (run.py:8)"),
        (ProgramConfig(command=("agent",)), TRACEBACK, " (client.py:99)"),
        (ProgramConfig(command=("python3", "run.py")), f"{TRACEBACK}I give up\n", ""),
        (ProgramConfig(command=("python3", "run.py")), "I give up", ""),
    ],
)
def test_the_line_that_raised_is_told(settings: ProgramConfig, errors: str, place: str) -> None:
    ended = Ended("ended", 1, 0, "", errors)
    last = errors.strip().rpartition("\n")[2]
    assert ended.fault(settings) == f"the program ended with exit status 1: {last}{place}"


@pytest.mark.slow
async def test_one_that_hangs_is_asked_and_then_killed(written: Settings) -> None:
    polite = "import signal, sys, time\n"
    polite += (
        'signal.signal(15, lambda *_: (print(\'{"answer": "late"}\', flush=True), sys.exit()))'
    )
    began = time.monotonic()
    ended = await run(written(f"{polite}\ntime.sleep(60)", deadline_s=3.0))
    assert ended.cause == "late" and result_of(ended).answer == "late"
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    settings = written(deaf, deadline_s=3.0, grace_s=0.3)
    ended = await run(settings)
    assert (ended.cause, ended.status) == ("late", -signal.SIGKILL)
    assert ended.fault(settings) == ("the program took over 3 s (environment.program.deadline_s)")
    assert time.monotonic() - began < 30


async def test_what_it_has_started_ends_with_it_also_outside_its_group(
    written: Settings, tmp_path: Path
) -> None:
    sleeper = f"[sys.executable, '-c', 'import time; time.sleep(61)', '{tmp_path}']"
    source = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen({sleeper})\n"
        f"subprocess.Popen({sleeper}, start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, {sleeper})\n    os._exit(0)\n"
        "os.wait()\nprint('{}')\n"
    )
    ended = await run(written(source))
    assert (ended.cause, ended.status) == ("ended", 0) and ended.left >= 2
    assert living(str(tmp_path)) == []


async def test_what_it_says_is_bounded_and_its_end_is_read(written: Settings) -> None:
    source = "import sys\nprint('x' * 1_000_000)\nprint('e' * 100_000, file=sys.stderr)\n"
    source += 'print(\'{"answer": "yes"}\')'
    ended = await run(written(source, output_bytes=100))
    assert len(ended.output) == 100 and result_of(ended).answer == "yes"
    assert len(ended.errors) < 5000
    ended = await run(written("print('x' * 1_000_000)", output_bytes=100))
    with pytest.raises(ProgramFailed, match=r"longer than environment\.program\.output_bytes"):
        result_of(ended)


@pytest.mark.parametrize(
    "line", ['{"answr": "x"}', '{"answer": 7}', '{"answer": "x", "reward": "1"}', "done"]
)
def test_a_last_line_that_is_no_result_is_named(line: str) -> None:
    with pytest.raises(ProgramFailed, match="print one line of JSON"):
        result_of(Ended("ended", 0, 0, f"before\n{line}\n", ""))


def test_one_that_prints_nothing_has_no_answer() -> None:
    result = result_of(Ended("ended", 0, 0, "\n", ""))
    assert result.answer is None and result.reward is None


async def test_its_memory_and_files_are_limited(written: Settings) -> None:
    settings = written("x = bytearray(600 << 20)", memory_mb=300)
    assert "MemoryError" in (await run(settings)).fault(settings)
    settings = written("open('big', 'wb').write(bytes(3 << 20))", file_mb=1)
    assert "File too large" in (await run(settings)).errors


async def test_one_that_is_given_up_is_over_when_its_rollout_is(
    written: Settings, tmp_path: Path
) -> None:
    source = f"import time; open('{tmp_path}/begun', 'w'); time.sleep(62)"
    async with Programs(written(source, grace_s=0.2)) as programs:
        running = asyncio.create_task(programs.run(QUESTION, {}))
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert living(str(tmp_path / "agent.py")) == []


@pytest.mark.slow
async def test_its_siblings_go_on(written: Settings, tmp_path: Path) -> None:
    source = "import sys, json, time\nif json.load(sys.stdin)['n']: time.sleep(63)\nprint('{}')"
    async with Programs(written(source, deadline_s=4.0, grace_s=0.2)) as programs:
        both = await asyncio.gather(*(programs.run(json.dumps({"n": n}), {}) for n in (0, 1)))
        assert [each.cause for each in both] == ["ended", "late"]
        assert programs.gauges()["actor/programs_late_total"] == 1.0


@pytest.mark.slow
async def test_no_more_run_at_once_than_may(written: Settings, tmp_path: Path) -> None:
    source = f"""
import os, time
os.mkdir("{tmp_path}/here")
time.sleep(0.05)
os.rmdir("{tmp_path}/here")
print("{{}}")
"""
    async with Programs(written(source, at_once=1)) as programs:
        ended = await asyncio.gather(*(programs.run(QUESTION, {}) for _ in range(4)))
    assert [each.status for each in ended] == [0, 0, 0, 0]


@pytest.mark.slow
async def test_a_killed_supervisor_fails_its_programs_and_is_replaced(written: Settings) -> None:
    source = "import os; os.kill(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9); "
    source += "import time; time.sleep(0.2); print('{}')"
    async with Programs(written(source)) as programs:
        assert (await programs.run(QUESTION, {})).status == 0  # its warden saw to it
        assert (await programs.run(QUESTION, {})).status == 0


@pytest.mark.slow
async def test_what_a_killed_warden_leaves_is_killed_too(written: Settings, tmp_path: Path) -> None:
    sleeper = f"[sys.executable, '-c', 'import time; time.sleep(64)', '{tmp_path}']"
    source = f"import os, signal, subprocess, sys\nopen('{tmp_path}/at', 'w').write(os.getcwd())\n"
    source += f"subprocess.Popen({sleeper}, start_new_session=True)\nos.kill(os.getppid(), 9)\n"
    async with Programs(written(source)) as programs:
        with pytest.raises(ProgramFailed, match="what supervises it was killed"):
            await programs.run(QUESTION, {})
        ends = time.monotonic() + 10
        while living(str(tmp_path)) and time.monotonic() < ends:
            await asyncio.sleep(0.05)
    assert living(str(tmp_path)) == []
    assert not Path((tmp_path / "at").read_text()).parent.exists()


@pytest.mark.slow
async def test_nothing_outlives_a_killed_actor(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(f"import time; open('{tmp_path}/begun', 'w'); time.sleep(65)")
    actor = tmp_path / "actor.py"
    actor.write_text(
        "import asyncio, sys\nfrom actors.gateway.program import Programs\n"
        "from configs.environment import ProgramConfig\n"
        f"settings = ProgramConfig(command=(sys.executable, {str(agent)!r}), grace_s=0.2)\n"
        "asyncio.run(Programs(settings).run('{}', {}))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, str(actor), env={**os.environ})
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.kill()
    await process.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == [] and living(str(agent)) == []


def config_of(settings: ProgramConfig) -> Config:
    return Config(environment=EnvironmentConfig(name="program", program=settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": ("/nowhere/agent",)}, "'/nowhere/agent': there is no such program"),
        ({"command": ("python3 agent.py",)}, "write a list of words, [python3,agent.py]"),
        ({"command": ("{here}/plain",)}, "it may not be executed: chmod +x"),
        ({"command": ("python3", "README.md")}, "in an empty folder of its own"),
        ({"command": ("true",), "deadline_s": 240.0}, "actors.rollout_deadline_s = 240"),
        ({"command": ("true",), "variables": ("NO_SUCH",)}, "no such variable here"),
        ({"entry_point": "{here}/agent.py:answr"}, "has no 'answr': name a function"),
        ({"entry_point": "{here}/agent.py:nothing"}, "let it take the question"),
        ({"entry_point": "{here}/gone.py:answer"}, "gone.py is no file"),
        ({"entry_point": "no_such_module:answer"}, "cannot be imported: ModuleNotFoundError"),
        (
            {"entry_point": "{here}/broken.py:answer"},
            "ZeroDivisionError: division by zero: ",
        ),
    ],
)
def test_a_program_that_cannot_run_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "agent.py").write_text("def answer(question): ...\ndef nothing(): ...\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    text = json.dumps(settings).replace("{here}", str(tmp_path))
    with pytest.raises(ConfigError) as raised:
        check(config_of(msgspec.json.decode(text, type=ProgramConfig)))
    assert "environment.program." in str(raised.value) and said in str(raised.value)


def test_one_that_can_run_is_not(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def answer(question): ...\n")
    check(config_of(ProgramConfig(entry_point=f"{tmp_path}/agent.py:answer")))
    check(config_of(ProgramConfig(command=(sys.executable, str(tmp_path / "agent.py")))))

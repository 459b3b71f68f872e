"""The tool `python`: what a program prints, and each limit that ends one."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from actors.environments.python_process import LIMIT, runner
from actors.environments.tools import load_tools
from configs.environment import EnvironmentConfig, PythonConfig


def run(code: str, **settings: Any) -> str:
    return runner(PythonConfig(**settings))(code)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_shows_what_it_prints() -> None:
    assert run("import sys\nprint(6 * 7)\nprint('err', file=sys.stderr)") == "42\nerr\n"
    assert run("print('caf\u00e9')") == "café\n"


def test_a_fault_shows_its_traceback_and_status() -> None:
    said = run("def f():\n    return 1 / 0\nf()")
    assert said.startswith("(exit status 1)\n") and "ZeroDivisionError: division by zero" in said
    assert run("raise SystemExit(7)") == "(exit status 7)\n"
    assert "SyntaxError" in run("print(")


def test_nothing_of_ours_is_in_its_environment_or_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORAGE_SECRET", "kelu")
    said = run("import os\nopen('x', 'w').close()\nprint(os.environ.get('FORAGE_SECRET'))")
    assert said == "None\n"
    folder = run("import os\nprint(os.getcwd(), os.listdir())").split()
    assert folder[1:] == ["['main.py']"] and not Path(folder[0]).exists()


@pytest.mark.parametrize(
    ("code", "settings", "told"),
    [
        ("while True: pass", {"cpu_s": 1}, "(ended by its limits: 1 s of CPU)"),
        ("import time\nprint('so', flush=True)\ntime.sleep(60)", {"wall_s": 3.0}, "so"),
        ("import time\ntime.sleep(60)", {"wall_s": 0.5}, "(ended after 0.5 s)"),
        ("x = bytearray(1 << 30)", {"memory_mb": 256}, "MemoryError"),
        ("open('x', 'wb').write(bytes(2 << 20))", {"file_mb": 1}, "File too large"),
        ("fs = [open('main.py') for _ in range(99)]", {}, "Too many open files"),
        ("print('x' * 9999)", {"output_bytes": 100}, "x\n(cut after 100 bytes)"),
    ],
)
def test_limits_end_a_program(code: str, settings: dict[str, Any], told: str) -> None:
    started = time.monotonic()
    assert told in run(code, **settings)
    assert time.monotonic() - started < 20


def test_nothing_that_a_program_leaves_holds_its_reader_up() -> None:
    code = """
import os, pathlib
for each in ("output", "../output", "main.py"):
    pathlib.Path(each).unlink(missing_ok=True)
    os.mkfifo(each)
    print("so")
os.unlink("../output")
"""
    started = time.monotonic()
    assert run(code) == "so\nso\nso\n"
    assert time.monotonic() - started < 20


def test_what_a_program_starts_ends_with_it() -> None:
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid)"
    pid = int(run(code))
    ends = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not is_alive(pid) and os.getpid() != pid


def test_it_is_a_tool_of_a_text_and_few_run_at_once() -> None:
    (tool,) = load_tools(EnvironmentConfig(tools=("python",)))
    assert (tool.name, tool.arguments.one_text, tool.limit) == ("python", "code", LIMIT)
    (tool,) = load_tools(EnvironmentConfig(tools=("python",), tool_limits={"python": 9}))
    assert tool.limit == 9

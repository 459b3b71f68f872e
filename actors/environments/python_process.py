"""The built-in tool `python`: a program in a process of its own, with limits of CPU, memory, files
and time. It protects from accidents, not from malice (docs/environments.md).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from configs.environment import PythonConfig

LIMIT = 4  # programs at once
_EVERY_S = 0.01
# The child limits itself: nothing may run between the fork and the exec of a process of threads.
_LAUNCH = """
import ctypes, os, resource as r, runpy, signal, sys
cpu, memory, size, parent = map(int, sys.argv[1:])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    sys.exit(1)
for which, limit in (
    (r.RLIMIT_CORE, 0), (r.RLIMIT_NOFILE, 64), (r.RLIMIT_FSIZE, size),
    (r.RLIMIT_CPU, cpu), (r.RLIMIT_AS, memory),
):
    r.setrlimit(which, (limit, limit))
sys.argv[:] = ["main.py"]
runpy.run_path("main.py", run_name="__main__")
"""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def runner(settings: PythonConfig) -> Callable[[str], str]:
    """Make the tool."""

    def python(code: Annotated[str, "a whole program, which prints its result"]) -> str:
        """It runs a Python program and shows what that prints. Nothing is kept between programs."""
        folder = Path(tempfile.mkdtemp(prefix="forage-python-"))
        try:
            return _run(code, folder, settings)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return python


def _run(code: str, folder: Path, settings: PythonConfig) -> str:
    (folder / "main.py").write_text(code, encoding="utf-8", errors="replace")
    limits = (settings.cpu_s, settings.memory_mb << 20, settings.file_mb << 20, os.getpid())
    with tempfile.TemporaryFile() as said:  # nameless: the program can put nothing in its place
        process = subprocess.Popen(
            [sys.executable, "-I", "-u", "-c", _LAUNCH, *map(str, limits)],
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        in_time = _ended(process.pid, settings.wall_s)
        os.killpg(process.pid, signal.SIGKILL)  # also what it has started; before it is reaped
        status = process.wait()
        written = os.pread(said.fileno(), settings.output_bytes + 1, 0)
    text = written[: settings.output_bytes].decode(errors="replace")
    over = len(written) > settings.output_bytes
    cut = f"\n(cut after {settings.output_bytes} bytes)" if over else ""
    return f"{_ending(status, in_time, settings)}{text}{cut}"


def _environment(work: Path) -> dict[str, str]:
    """Nothing of ours: it may hold secrets."""
    own = {"HOME": str(work), "TMPDIR": str(work), "PATH": os.defpath, "LANG": "C.UTF-8"}
    return own | dict.fromkeys(_ONE_THREAD, "1")


def _ended(pid: int, limit_s: float) -> bool:
    """Wait for the end of a child, which is left to be reaped; False where it takes longer."""
    ends = time.monotonic() + limit_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > ends:
            return False
        time.sleep(_EVERY_S)
    return True


def _ending(status: int, in_time: bool, settings: PythonConfig) -> str:
    if not in_time:
        return f"(ended after {settings.wall_s:g} s)\n"
    if status == -signal.SIGXCPU or status == -signal.SIGKILL:
        return f"(ended by its limits: {settings.cpu_s} s of CPU)\n"
    return f"(exit status {status})\n" if status else ""

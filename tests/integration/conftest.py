"""Real runs of the demo task through the real command, and what they must not leave behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from configs.runtime.process import REPOSITORY, socket_dir
from scripts.demo.task import DemoFiles, prepare
from scripts.fleet import guardian
from tests.faults.chaos import TWO_ACTORS
from tests.integration.spelt import Task, make_task


class Run:
    """A launched run whose output is collected line by line."""

    def __init__(self, run_dir: Path, arguments: list[str], scratch: Path) -> None:
        """`scratch`: where the run's processes have their temporary files."""
        self.run_dir = run_dir
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "scripts/launch.py", *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"TMPDIR": str(scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def wait_for(self, words: str, deadline_s: float) -> None:
        """Wait until a line of the output contains `words`."""
        end = time.monotonic() + deadline_s
        while not any(words in line for line in list(self.lines)):
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"no line with {words!r} in:\n{''.join(self.lines)}{self.logs()}")
            time.sleep(0.1)

    def wait(self, deadline_s: float) -> int:
        """The exit code."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still runs after {deadline_s} s:\n{''.join(self.lines)}{self.logs()}")
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def pids(self) -> list[int]:
        """Living processes of this run, the launcher and its guardian excepted."""
        return guardian.members(f"{socket_dir(str(self.run_dir)).name}-{self.process.pid}")

    def pid_of(self, words: str) -> int:
        """The pid of the member whose command line contains `words`."""
        return only(lambda: [p for p in self._members() if words in line_of(p)], words)

    def engine_of(self, actor_id: str) -> int:
        """The pid of an actor's engine child."""
        actor = psutil.Process(self.pid_of(f"--actor-id {actor_id}"))
        helper = "resource_tracker"
        return only(lambda: [c for c in actor.children() if helper not in line_of(c)], "engine")

    def _members(self) -> Iterator[psutil.Process]:
        for pid in self.pids():
            with suppress(psutil.NoSuchProcess):  # Ray and engines have helpers that come and go
                yield psutil.Process(pid)

    def logs(self) -> str:
        """The end of every process's log."""
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "".join(f"--- {f.name}\n{f.read_text(errors='replace')[-1500:]}\n" for f in files)

    def leftovers(self, deadline_s: float) -> list[int]:
        """Processes still alive at the deadline; an empty list as soon as there are none."""
        end = time.monotonic() + deadline_s
        while (pids := self.pids()) and time.monotonic() < end:
            time.sleep(0.2)
        return pids


def line_of(process: psutil.Process) -> str:
    """Its command line; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def only(look: Callable[[], list[psutil.Process]], words: str) -> int:
    """The pid of the one that is found; a child that has not yet begun its own program has its
    parent's command line for a moment.
    """
    end = time.monotonic() + 10.0
    while len(found := look()) != 1 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(found) == 1, f"{words!r} is in {len(found)}: {[line_of(each) for each in found]}"
    return found[0].pid


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    """The demo task: what `make demo` has cached, or made here, cold start included."""
    cached = REPOSITORY / ".cache"
    return prepare(cached if cached.is_dir() else tmp_path_factory.mktemp("demo"), 0, print)


@pytest.fixture(scope="session")
def bpe_task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """The task of a small Qwen2 whose tags are several tokens."""
    return make_task(tmp_path_factory.mktemp("spelt"))


@pytest.fixture(scope="session")
def bpe_model(bpe_task: Task) -> Path:
    """Its Hugging Face folder: byte-level BPE, Qwen's chat template with tools."""
    return bpe_task.model


@pytest.fixture
def begin() -> Iterator[Callable[[Path, list[str]], Run]]:
    """begin(run_dir, arguments): start a run; whatever is left of it is killed afterwards."""
    runs: list[Run] = []
    scratch = Path(tempfile.mkdtemp(prefix="run-"))  # short: sockets lie there

    def start(run_dir: Path, arguments: list[str]) -> Run:
        runs.append(Run(run_dir, arguments, scratch))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            os.kill(run.process.pid, signal.SIGKILL)
            run.process.wait()
        for pid in run.leftovers(5.0):
            os.kill(pid, signal.SIGKILL)
    left = list(scratch.glob("vllm_dist_*"))
    shutil.rmtree(scratch)
    assert not left


@pytest.fixture
def launch(
    begin: Callable[[Path, list[str]], Run], demo_files: DemoFiles, tmp_path: Path
) -> Callable[..., Run]:
    """Start a run on the demo task, of another seed where `files` says so, or go on with one
    (`resume`).
    """

    def start(
        *overrides: str, name: str = "run", resume: bool = False, files: DemoFiles = demo_files
    ) -> Run:
        run_dir = tmp_path / name
        arguments = [
            "configs/demo.yaml",
            f"run_dir={run_dir}",
            f"model.path={files.model}",
            f"questions.train={files.train}",
            f"questions.eval={files.eval}",
            f"retrieval.corpus={files.corpus}",
            *TWO_ACTORS,
        ]
        again = ["--resume", str(run_dir)]
        return begin(run_dir, [*(again if resume else arguments), *overrides])

    return start

"""The processes of a run: every long-lived process runs under one Ray host actor of its own.

Ray only *places*: a host starts one `python -m <package>.worker` in its own group and reports its
exit code. The worker asks the kernel to die with its parent, so a host (or Ray, or the launcher)
that is killed takes its worker along. Every wait has a deadline. The only module that imports ray.
"""

import contextlib
import faulthandler
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Ray gives its workers way to everything else on the machine (15); they are the work here.
os.environ.setdefault("RAY_worker_niceness", "0")

import psutil
import ray

from configs.runtime.process import Exit, start_child
from configs.runtime.watchdog import phase
from scripts.fleet import guardian

RAY_STARTS = 3  # on a machine that is busy
RAY_DEADLINE_S = 180.0  # of all of them: to connect to what it has started Ray waits without end
LOCKED_S = 10.0  # after that: the process ends, and says where it stood
CALL_DEADLINE_S = 30.0
MONITOR = "RAY_memory_monitor_refresh_ms"  # 0: Ray does not look at memory
_GONE = (ray.exceptions.RayError,)
log = logging.getLogger(__name__)


class FleetError(RuntimeError):
    """A process could not be placed or did not answer; the message names it."""


class Host:
    """Runs one worker process; lives in a Ray actor. The kernel's parent-death signal follows the
    *thread* that forked, so a thread that lives as long as the worker starts it and waits for it.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], log_path: str, ready_path: str
    ) -> None:
        self._command, self._log_path, self._ready_path = command, log_path, ready_path
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str] | None = None) -> tuple[int, float, int]:
        """Start the worker; return its pid, when that was (epoch) and how long its log was."""
        if self._process is not None and self._process.poll() is None:
            raise FleetError(f"process {self._process.pid} still runs {' '.join(self._command)}")
        self._command, self._process = command or self._command, None
        Path(self._ready_path).unlink(missing_ok=True)
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        process = self._process if started.wait(CALL_DEADLINE_S) else None
        if process is None:
            raise FleetError(f"could not start {' '.join(self._command)}")
        return process.pid, self._started_at, self._log_from

    def ready_at(self) -> float | None:
        """The time, since the epoch, at which the worker said that it works; None before."""
        try:
            return Path(self._ready_path).stat().st_mtime
        except FileNotFoundError:
            return None

    def poll(self) -> int | None:
        """The worker's exit code (negative: the signal that ended it), or None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self) -> int:
        """Return the exit code of the worker that runs now, once it has ended."""
        thread, process = self._thread, self._process
        thread.join()
        assert process is not None  # there is a thread
        return process.wait()

    def stopped(self) -> list[int]:
        """The pids that are stopped (SIGSTOP) of the worker and its own, such as its engine."""
        if self._process is None or self._process.poll() is not None:
            return []
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            worker = psutil.Process(self._process.pid)
            for each in (worker, *worker.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    if each.status() == psutil.STATUS_STOPPED:
                        found.append(each.pid)
        return found

    def kill(self, signal_number: int) -> None:
        """Send a signal to the worker if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal_number)

    def _run(self, started: threading.Event) -> None:
        self._started_at = time.time()
        log_path = Path(self._log_path)
        self._log_from = log_path.stat().st_size if log_path.exists() else 0
        self._process = start_child(
            self._command,
            log=log_path,
            ready=Path(self._ready_path),
            environment=self._environment,
            # Ctrl-C at the terminal is the launcher's alone. No session of its own: Linux
            # shares the CPU out by session first, and only within one by niceness.
            own_group=True,
        )
        started.set()
        self._process.wait()


def start_ray(cores: int | None, folder: Path) -> None:
    """Start Ray on so many cores, its session in a folder of the caller's; it says nothing."""
    ray.init(
        num_cpus=cores,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=100 << 20,
        _temp_dir=str(folder),
    )


def _leave(message: str) -> None:
    """End this process, which cannot leave Ray's native code; the guardian ends Ray's."""
    print(f"forage: {message}: run the same command again", file=sys.stderr, flush=True)
    os._exit(Exit.FAILED)


def _answer(method: Any, *arguments: object) -> Any:
    return ray.get(method.remote(*arguments), timeout=CALL_DEADLINE_S)


class Member:
    """One placed process: its name, log and pid, the command that started it, and when."""

    def __init__(
        self,
        name: str,
        host: Any,
        started: tuple[int, float, int],
        log_path: Path,
        command: list[str],
    ) -> None:
        self.name, self.log_path, self.command, self.host = name, log_path, command, host
        self.pid, self.started_at, self._log_from = started
        self.exit_code: int | None = None
        self._end = host.wait.remote()  # asked once: to ask again and again costs each host

    def ready_at(self) -> float | None:
        """The time, since the epoch, at which the process said that it works; None before."""
        with contextlib.suppress(*_GONE):  # `poll` says what has become of it
            found: float | None = _answer(self.host.ready_at)
            return found
        return None

    def stopped(self) -> list[int]:
        """The pids that are stopped (SIGSTOP) of it and its own processes. Raises FleetError for a
        host that does not answer.
        """
        try:
            return list(_answer(self.host.stopped))
        except ray.exceptions.GetTimeoutError as error:
            raise FleetError(
                f"the host of {self.name} did not answer in {CALL_DEADLINE_S} s"
            ) from error
        except _GONE:  # `poll` says what has become of it
            return []

    def host_lives(self) -> bool:
        """True where the host answers, so that it may start the process again."""
        with contextlib.suppress(*_GONE):
            _answer(self.host.poll)
            return True
        return False

    def poll(self) -> int | None:
        """The exit code, or None while it runs; a host that is gone counts as killed (-9)."""
        if self.exit_code is None and ray.wait([self._end], timeout=0)[0]:
            try:
                self.exit_code = ray.get(self._end)
            except ray.exceptions.RayError:
                self.exit_code = -signal.SIGKILL
        return self.exit_code

    def signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        try:
            _answer(self.host.kill, number)
        except _GONE:
            log.warning("the host of %s is gone", self.name)

    def last_words(self, lines: int = 12) -> str:
        """The end of its log, since its last start."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(self._log_from)
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


class Fleet:
    """Every process of a run, by name; `with Fleet(...)` ends them all, whatever happens."""

    def __init__(self, log_dir: Path, directory: Path, environment: dict[str, str]) -> None:
        """`directory` is the run's own 0700 directory under /tmp: sockets, and Ray's session inside
        it. `environment` is added to that of every process.
        """
        self.log_dir, self.directory, self._environment = log_dir, directory, environment
        self.members: dict[str, Member] = {}

    def __enter__(self) -> "Fleet":
        token = f"{self.directory.name}-{os.getpid()}"
        self._guardian = guardian.start(token, self.directory)
        os.environ.update(
            {guardian.TOKEN: token, "SPT_NOENV": "1", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        )
        # Ray's monitor would end the hosts, which are small, for what their processes hold; the
        # kernel ends the process that holds most, and that one is started again.
        os.environ.setdefault(MONITOR, "0")
        # Where Ray holds the interpreter's lock while it waits, no thread of Python's can watch.
        faulthandler.dump_traceback_later(RAY_DEADLINE_S + LOCKED_S, exit=True)
        try:
            with phase("starting Ray", RAY_DEADLINE_S, _leave, who="the launcher"):
                self._start_ray()
        finally:
            faulthandler.cancel_dump_traceback_later()
        return self

    def _start_ray(self) -> None:
        for left in reversed(range(RAY_STARTS)):
            try:
                start_ray(os.cpu_count(), self.directory / "ray")
                return
            except Exception as error:  # Ray raises it bare
                ray.shutdown()
                if not left or "timed out during startup" not in str(error):  # it waits for 30 s
                    raise

    def __exit__(self, *_: object) -> None:
        self.end(list(self.members), deadline_s=5.0)
        ray.shutdown()
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        self._guardian.wait(CALL_DEADLINE_S)

    def start(self, commands: dict[str, list[str]]) -> None:
        """Place the processes all at once; one that has ended is replaced. Raises FleetError."""
        placed = {name: self._place(name, command) for name, command in commands.items()}
        for name, (host, start) in placed.items():
            try:
                started = ray.get(start, timeout=60.0)
            except (ray.exceptions.RayError, FleetError) as error:
                raise FleetError(f"could not place {name}: {error}") from error
            self.members[name] = Member(name, host, started, self._log_path(name), commands[name])

    def _place(self, name: str, command: list[str]) -> tuple[Any, Any]:
        """The host of a process, its last one if that lives, and what its start will return."""
        if name in self.members and self.members[name].host_lives():
            host = self.members[name].host
            return host, host.start.remote(command)
        ready = str(self.directory / f"{name}.ready")
        # Two calls at once: one waits for the worker's end, beside all others.
        remote = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(Host)
        host = remote.remote(command, self._environment, str(self._log_path(name)), ready)
        return host, host.start.remote()

    def _log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def dead(self) -> dict[str, int]:
        """Exit codes of the processes that have ended."""
        codes = {name: member.poll() for name, member in self.members.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def wait(self, names: list[str], deadline_s: float) -> list[str]:
        """Wait until these have ended; return those that have not by the deadline."""
        end = time.monotonic() + deadline_s
        left = [name for name in names if name in self.members]
        while left := [name for name in left if self.members[name].poll() is None]:
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        return left

    def end(self, names: list[str], deadline_s: float) -> list[str]:
        """SIGTERM these; SIGKILL and return the names of what is left at the deadline."""
        alive = [name for name in names if self.members[name].poll() is None]
        for name in alive:
            self.members[name].signal(signal.SIGTERM)
        left = self.wait(alive, deadline_s)
        for name in left:
            self.members[name].signal(signal.SIGKILL)
        self.wait(left, 5.0)
        return left

"""The host of one process: it starts a worker on the machine that it lies on, and tells of it."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil

from configs.runtime.process import start_child, waiting_beside
from configs.runtime.signals import MAKE_WAY

CALL_DEADLINE_S = 30.0
TAIL_BYTES = 64 << 10  # of a log, which may have grown to gigabytes
NOTICE_MARGIN_S = 5.0  # of a node's last seconds: leases go back, the process ends


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
        for said in (Path(self._ready_path), waiting_beside(self._ready_path)):
            said.unlink(missing_ok=True)
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

    def awaits_others(self) -> bool:
        """True where the worker said that its own start is done, and it waits for others."""
        return waiting_beside(self._ready_path).exists()

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

    def drain(self, within_s: float) -> None:
        """Have the worker, an actor, drain; after so long it gives back what it has not done, and
        NOTICE_MARGIN_S later it is killed.
        """
        self.kill(signal.SIGTERM)
        if self._process is not None:
            # Here, and not at the launcher: that one may be busy placing others.
            hurrying = (self._thread, self._process, within_s)
            threading.Thread(target=_hurry, args=hurrying, daemon=True).start()

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


def _hurry(end: threading.Thread, process: "subprocess.Popen[bytes]", within_s: float) -> None:
    """Await the end of a process that drains; `end` is the thread that lives as long."""
    for number, patience_s in ((MAKE_WAY, within_s), (signal.SIGKILL, NOTICE_MARGIN_S)):
        end.join(patience_s)
        if end.is_alive():
            process.send_signal(number)


def time_to_drain(leaves_at: float, now: float) -> float | None:
    """Seconds that a node which leaves at that time, since the epoch, has for rollouts; None where
    that is not known (0).
    """
    return max(0.0, leaves_at - NOTICE_MARGIN_S - now) if leaves_at else None


def tail(path: str, offset: int) -> str:
    """What a log has from there on, the end of it where that is much, behind a line that says how
    much is left out; '' where there is none.
    """
    try:
        with Path(path).open("rb") as file:
            left_out = max(0, file.seek(0, os.SEEK_END) - offset - TAIL_BYTES)
            file.seek(offset + left_out)
            said = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return f"[{left_out} bytes before this are left out]\n{said}" if left_out else said

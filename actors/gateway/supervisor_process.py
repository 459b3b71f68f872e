"""The process of a supervisor (`supervisor.py`), as the actor that starts it sees it."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from actors.errors import ProgramFailed
from actors.gateway.warden import MARK, remove
from configs.environment import ProgramConfig

_LOADED_WITHIN_S = 120.0  # an entry point may import much
_CLOSED_WITHIN_S = 10.0
_ROUNDS, _ROUND_S = 500, 0.01  # of killing, until nothing is left
# Of the actor's environment: where things lie, and the run's mark, by which its guardian finds
# whatever is left when the run is killed. Nothing that may be a secret.
_HANDED_ON = (
    *("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH"),
    *("PYTHONPATH", "SHELL", "TERM", "TZ", "USER", "VIRTUAL_ENV", "FORAGE_RUN", "FORAGE_TESTS"),
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class SupervisorProcess:
    """A supervisor's process. Raises ProgramFailed where its entry point cannot be loaded."""

    def __init__(self, settings: ProgramConfig) -> None:
        self._folders, self._mark = "", secrets.token_hex(16)
        self._within_s = settings.grace_s + _CLOSED_WITHIN_S
        self._control, theirs = socket.socketpair()
        words = [sys.executable, "-m", "actors.gateway.supervisor", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*words, json.dumps(settings_of(settings))],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the log of the actor
                env=environment_of(settings) | {MARK: self._mark},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            fault = self._hello()
        except BaseException:
            self._process.kill()
            self.end()
            raise
        if fault:
            self.end()
            raise ProgramFailed(fault)
        self._control.setblocking(False)

    @property
    def ended(self) -> bool:
        """True once its process has ended."""
        return self._process.poll() is not None

    def give(self, connection: socket.socket) -> None:
        """Hand a program's connection over. Raises OSError."""
        socket.send_fds(self._control, [b"+"], [connection.fileno()])

    def close(self) -> None:
        """Have it end once its programs have ended."""
        self._control.close()

    def kill(self) -> None:
        """Kill its process alone."""
        self._process.kill()

    def end(self) -> None:
        """Close it, wait for its end, and kill what it has left, which it does where it or a warden
        was stopped or killed.
        """
        self.close()
        try:
            self._process.wait(self._within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for _ in range(_ROUNDS):
            if not (left := _marked(self._mark)):
                break
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_ROUND_S)
        if self._folders:
            remove(self._folders)

    def _hello(self) -> str:
        self._control.settimeout(_LOADED_WITHIN_S)
        try:
            with self._control.makefile("rb") as lines:
                told = lines.readline()
        except TimeoutError as error:
            raise ProgramFailed(f"it was not loaded within {_LOADED_WITHIN_S:g} s") from error
        if not told:
            raise ProgramFailed("its process ended while it was loaded: the actor's log says why")
        said = json.loads(told)
        self._folders = str(said["folders"])
        return str(said["fault"])


def settings_of(settings: ProgramConfig) -> dict[str, object]:
    """What a supervisor is told of them, and a warden, too."""
    return {
        "entry_point": settings.entry_point,
        "grace_s": settings.grace_s,
        "memory_bytes": settings.memory_mb << 20,
        "file_bytes": settings.file_mb << 20,
    }


def _marked(mark: str) -> list[int]:
    """The living processes of a supervisor's, itself included."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended meanwhile, or is another user's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def environment_of(settings: ProgramConfig) -> dict[str, str]:
    """Return what programs are given of this process's environment."""
    names = [*_HANDED_ON, *settings.variables]
    given = {name: os.environ[name] for name in names if name in os.environ}
    return dict.fromkeys(_ONE_THREAD, "1") | given

"""The supervisor of an actor's programs: a process of its own, with the standard library alone.

`python -m actors.gateway.supervisor FD SETTINGS` imports the entry point once and forks for each
program, so that none waits for imports. A program has a *warden*, which the kernel makes the
parent of whatever the program leaves behind: at the end it finds and kills all of that. The
connections of the wardens close when the actor is killed, too: then they, and this process, end.

`FD`: a socket, which tells whether the entry point could be loaded; then each byte on it brings the
connection of one program. `SETTINGS`: JSON, those fields of `environment.program` that it needs.
"""

import contextlib
import gc
import importlib
import importlib.util
import inspect
import json
import math
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from actors.gateway.warden import Function, Warden, adopt, kill_descendants, leave, limit, remove

_LOOK_S = 0.5  # between looks at wardens that have ended
_ROUND_S = 0.01
_ENDED_WITHIN_S = 5.0  # wardens, once their programs have to be over
_THREADS_END_S = 1.0  # those that an import has joined are about to
_LEAST_BYTES = 32 << 20  # that a program may use beside what was imported


class BadEntryPoint(Exception):
    """An entry point that cannot be called; the message says why."""


def load(entry_point: str) -> Function:
    """Import the function that `package.module:function` or `FILE.py:function` names. Raises
    BadEntryPoint.
    """
    place, _, name = entry_point.rpartition(":")
    try:
        found: Any = _module(place)
    except FileNotFoundError as error:
        raise BadEntryPoint(f"{place} is no file: name one that is there") from error
    except BaseException as error:
        raise BadEntryPoint(
            f"{place} cannot be imported: {type(error).__name__}: {error}: correct it, or put its "
            "folder on PYTHONPATH; what needs a key or URL (an OpenAI client) is made in the "
            "function"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadEntryPoint(f"{place} has no {part!r}: name a function that it holds")
        found = getattr(found, part)
    try:
        inspect.signature(found).bind({})
    except (TypeError, ValueError) as error:
        raise BadEntryPoint(
            f"{name} cannot be called with one argument ({error}): let it take the question"
        ) from error
    return found  # type: ignore[no-any-return]


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve(strict=True)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a file that ends in .py
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_forks(settings: dict[str, Any]) -> None:
    """Raise BadEntryPoint where what the import has left could not be forked for programs."""
    ends = time.monotonic() + _THREADS_END_S
    while len(sys._current_frames()) > 1:
        if time.monotonic() > ends:
            left = [each.name for each in threading.enumerate()][1:]
            raise BadEntryPoint(
                f"its import leaves threads running ({', '.join(left) or 'without a name'}), and "
                "each program is a fork, which has none of them and may wait for their locks for "
                "ever: begin threads in the function"
            )
        time.sleep(_ROUND_S)
    if (pid := os.fork()) == 0:
        leave(partial(_use_a_little, settings), flush=False)
    if os.waitpid(pid, 0)[1]:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        raise BadEntryPoint(
            f"its import takes {mapped >> 20} MB of address space, which leaves a program nothing "
            f"of environment.program.memory_mb = {settings['memory_bytes'] >> 20}: import less, or "
            "raise that (0: no limit)"
        )


def _use_a_little(settings: dict[str, Any]) -> None:
    limit(settings)
    try:
        bytearray(_LEAST_BYTES)
    except MemoryError:
        sys.exit(1)


class Supervisor:
    """Forks a warden for each connection, until the actor has gone and all wardens have; then
    removes `folders`, which holds those of programs.
    """

    def __init__(
        self, control: socket.socket, function: Function | None, folders: str, grace_s: float
    ) -> None:
        self._control, self._function, self._folders = control, function, folders
        self._grace_s, self._actor = grace_s, os.getppid()
        self._wardens: set[int] = set()
        self._orphans = False  # of a warden that was killed

    def run(self) -> None:
        """Serve until the end."""
        while self._take():
            self._reap()
        ends = math.inf
        while self._wardens or self._orphans:
            time.sleep(_ROUND_S)
            self._reap()
            now = time.monotonic()
            if os.getppid() != self._actor:  # killed: none of its programs has to go on
                ends = min(ends, now + self._grace_s + _ENDED_WITHIN_S)
            if now > ends:  # a warden that its program has stopped
                kill_descendants()
        remove(self._folders)

    def _take(self) -> bool:
        """Fork a warden if one is asked for; False once nobody can ask any more."""
        if not select.select([self._control], [], [], _LOOK_S)[0]:
            return True
        told, connections, _, _ = socket.recv_fds(self._control, 1, 1)
        for each in connections:
            if (pid := os.fork()) == 0:
                self._control.close()
                connection = socket.socket(fileno=each)
                leave(Warden(connection, self._function, self._folders).run, flush=False)
            self._wardens.add(pid)
            os.close(each)
        return bool(told)

    def _reap(self) -> None:
        """Take leave of who has ended; kill what is left of a warden that was killed."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._orphans |= ended[0] in self._wardens and bool(ended[1])
                self._wardens.discard(ended[0])
        if self._orphans:
            self._orphans = bool(kill_descendants(self._wardens))


def main(arguments: Sequence[str]) -> None:
    """Load the entry point, say whether that could be done, serve."""
    number, told = arguments
    settings = json.loads(told)
    control = socket.socket(fileno=os.dup(int(number)))  # a small number, as `select` wants
    os.close(int(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt()
    fault, function = "", None
    try:
        if settings["entry_point"]:
            function = load(settings["entry_point"])
            check_forks(settings)
    except BadEntryPoint as error:
        fault = str(error)
    folders = "" if fault else tempfile.mkdtemp(prefix="forage-programs-")
    sys.stdout.flush()  # what the import has printed, once and not by each fork
    sys.stderr.flush()
    control.sendall(json.dumps({"fault": fault, "folders": folders}).encode() + b"\n")
    if not fault:
        gc.collect()
        gc.freeze()  # what is loaded stays shared with the forks
        Supervisor(control, function, folders, settings["grace_s"]).run()


if __name__ == "__main__":
    leave(partial(main, sys.argv[1:]), flush=False)  # it waits for no thread of an import

"""The warden of a program: its parent, which starts it, waits for its end, its deadline or the end
of its connection, and then kills all that it has started. With the standard library alone.

On the connection comes one line of JSON, the request, and go two lines: the warden's number, by
which it can be ended where it hangs, and JSON, how the program ended.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ERROR_BYTES = 4000  # of the end of what a program says on standard error
_ROUNDS = 500  # of killing, until nothing is left of a program
_ROUND_S = 0.01
_PIECE_BYTES, _PIECES = 1 << 16, 64
MARK = "FORAGE_PROGRAMS"  # a variable of all that one supervisor has started, by which it is found
ENDED, LATE, STOPPED = "ended", "late", "stopped"
_OURS = (signal.SIGCHLD, signal.SIGINT)  # handled otherwise here than by a program
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
Function = Callable[[dict[str, Any]], Any]


class Warden:
    """The parent of one program: starts it, waits, ends all that it has started, and tells.
    `folders`: where the program's own is made.
    """

    def __init__(self, connection: socket.socket, function: Function | None, folders: str) -> None:
        self._connection, self._function, self._folders = connection, function, folders
        self._said: dict[int, bytearray] = {}  # the end of what was read from each pipe
        self._keep: dict[int, int] = {}  # how much of it
        self._cut: dict[int, bool] = {}  # what is kept begins within a line
        self._open: set[int] = set()
        self._unread = b""  # of the question, by a command
        self._asked = -1  # the pipe of it; -1 once there is nothing more to write

    def run(self) -> None:
        """Serve the one request of the connection."""
        request = json.loads(self._connection.makefile("rb").readline() or b"null")
        if request is None:
            return  # the actor has given it up before it began
        adopt()
        self._tell(str(os.getpid()))
        folder = tempfile.mkdtemp(prefix="program-", dir=self._folders)
        try:
            self._tell(json.dumps(self._supervise(request, folder)))
        finally:
            end_descendants()
            remove(folder)
        if _has_children():  # which bred faster than they could be killed: the supervisor goes on
            sys.exit(1)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the actor has gone
            self._connection.sendall(line.encode() + b"\n")

    def _supervise(self, request: dict[str, Any], folder: str) -> dict[str, Any]:
        wakes = _wakeup()
        (asked, asked_in), (output, output_in), (errors, errors_in) = (os.pipe() for _ in "012")
        begun = Beginning(request, folder, (asked, output_in, errors_in), self._function)
        if (pid := os.fork()) == 0:
            self._connection.close()
            leave(begun.run)
        for each in (asked, output_in, errors_in):
            os.close(each)
        self._asked, self._unread = asked_in, begun.read_by_a_command
        self._keep = {output: request["output_bytes"], errors: _ERROR_BYTES}
        self._said = {each: bytearray() for each in self._keep}
        self._open = {*self._keep}
        cause = self._wait(pid, wakes, request["deadline_s"], request["grace_s"])
        self._read()
        said = bytes(self._said[output])  # before what it has left behind says more
        status = _ended(pid)
        left = end_descendants()
        self._read()
        return {
            "cause": cause,
            "status": status,
            "left": left,
            "output": said.decode(errors="replace"),
            "errors": self._said[errors].decode(errors="replace"),
            "cut": self._cut.get(output, False),
        }

    def _wait(self, pid: int, wakes: int, deadline_s: float, grace_s: float) -> str:
        """Wait until the program is over, and end it where it has to be; return the cause."""
        cause, ends, termed = "", time.monotonic() + deadline_s, False
        while not _is_over(pid):
            if not cause and self._is_given_up():
                cause, ends = STOPPED, 0.0
            left_s = ends - time.monotonic()
            if left_s <= 0:
                cause = cause or LATE
                with contextlib.suppress(OSError):  # the group has ended meanwhile
                    os.killpg(pid, signal.SIGKILL if termed else signal.SIGTERM)
                ends, termed = time.monotonic() + grace_s, True
                continue
            watched = [wakes, *self._open] + [self._connection.fileno()] * (not cause)
            self._write()
            asked = [self._asked] * (self._asked >= 0)
            if wakes in select.select(watched, asked, [], left_s)[0]:
                os.read(wakes, 1024)
            self._read()
        return cause or ENDED

    def _write(self) -> None:
        """Write what the pipe of the question takes; who does not read it holds up nobody."""
        if self._asked < 0:
            return
        os.set_blocking(self._asked, False)
        try:
            self._unread = self._unread[os.write(self._asked, self._unread) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unread = b""
        if not self._unread:
            os.close(self._asked)
            self._asked = -1

    def _is_given_up(self) -> bool:
        """True once the actor's side of the connection has closed."""
        ready = select.select([self._connection], [], [], 0)[0]
        return bool(ready) and not self._connection.recv(1024)

    def _read(self) -> None:
        """Read what there is, and keep the end of it."""
        for pipe in list(self._open):
            os.set_blocking(pipe, False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(_PIECES):  # a program that never stops writing is late all the same
                    if not (piece := os.read(pipe, _PIECE_BYTES)):
                        self._open.discard(pipe)
                        break
                    said = self._said[pipe]
                    said += piece
                    if (over := len(said) - self._keep[pipe]) > 0:
                        self._cut[pipe] = said[over - 1] != ord("\n")
                        del said[:over]


class Beginning:
    """A program's own process, from its fork to its first line; `ends`: what it reads the question
    from, says its result on, and its errors. A command has them as its standard streams. A function
    has nothing to read there, and what it prints goes nowhere: what it, or a process that it
    starts, says on a standard stream is no question and no result.
    """

    def __init__(
        self,
        request: dict[str, Any],
        folder: str,
        ends: tuple[int, int, int],
        function: Function | None,
    ) -> None:
        self._request, self._folder, self._ends = request, folder, ends
        self._function, self._parent = function, os.getpid()

    @property
    def read_by_a_command(self) -> bytes:
        """What goes to a command's standard input."""
        return self._request["question"].encode() if self._request["command"] else b""

    def run(self) -> None:
        """Become the program."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        command = self._request["command"]
        for number in (*_OURS, *(_IGNORED_BY_PYTHON if command else ())):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:
            os._exit(1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        question, result, errors = self._ends
        for stream, end in enumerate((question, result) if command else (nowhere, nowhere)):
            os.dup2(end, stream)
        os.dup2(errors, 2)
        os.chdir(self._folder)
        limit(self._request)
        environment = {**self._request["environment"], "TMPDIR": self._folder}
        environment |= {MARK: os.environ[MARK]} if MARK in os.environ else {}
        if command:
            try:
                os.execvpe(command[0], command, environment)
            except OSError as error:
                sys.exit(f"{command[0]}: {error.strerror}")
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = self._folder
        self._call()

    def _call(self) -> None:
        """Call the function; its value is the result."""
        assert self._function is not None  # there is no command
        itself = os.getpid()
        value = self._function(json.loads(self._request["question"]))
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        if os.getpid() != itself:
            return  # a fork of the function's that comes back, too
        value = {"answer": value} if isinstance(value, str) else {} if value is None else value
        if not isinstance(value, dict):
            raise TypeError(
                f"it returned {value!r}: return a text, a dict of answer and reward, or None"
            )
        line, most = json.dumps(value).encode(), self._request["output_bytes"]
        if len(line) > most:
            raise ValueError(
                f"its result takes {len(line)} bytes as JSON, over environment.program.output_bytes"
                f" = {most}: shorten it, or raise that"
            )
        with open(self._ends[1], "wb", closefd=False) as result:
            result.write(line)


async def _awaited(value: Any) -> Any:
    return await value


def limit(settings: dict[str, Any]) -> None:
    """Limit this process and all that it starts."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_AS: settings["memory_bytes"] or resource.RLIM_INFINITY,
    }
    for which, wanted in limits.items():
        most = resource.getrlimit(which)[1]
        least = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(which, (least, least) if wanted >= 0 else (most, most))


def end_descendants() -> int:
    """Kill and bury every descendant of this process; return how many there were to kill."""
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break  # there are none
        killed |= kill_descendants()
        time.sleep(_ROUND_S)
    return len(killed)


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return True
    return False


def kill_descendants(spared: Collection[int] = ()) -> set[int]:
    """Kill every living descendant of this process but those spared, and theirs; return them."""
    killed: set[int] = set()
    children = _children()
    waiting = [os.getpid()]
    while waiting:
        found = [each for each in children.get(waiting.pop(), ()) if each not in spared]
        waiting += found
        killed |= {*found}
    for pid in killed:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return killed


def _children() -> dict[int, list[int]]:
    """The living processes by their parents, zombies left out."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
                if state != "Z":
                    found.setdefault(int(parent), []).append(int(entry.name))
    return found


def _is_over(pid: int) -> bool:
    """True once a child has ended, which is left to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ended(pid: int) -> int:
    """Kill the group of a child that is over, before its number is free; return its exit status,
    or, negative, the signal that ended it.
    """
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wakeup() -> int:
    """A pipe that can be read from when a child ends."""
    wakes, wakes_in = os.pipe()
    for each in (wakes, wakes_in):
        os.set_blocking(each, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes_in, warn_on_full_buffer=False)
    return wakes


def adopt() -> None:
    """Become the parent of descendants whose own parent ends (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value))


def remove(folder: str) -> None:
    """Remove a folder, however deep, as far as it lets itself be removed."""
    with contextlib.suppress(OSError):
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def leave(work: Callable[[], None], flush: bool = True) -> NoReturn:
    """Do a fork's work, and end it without what its parent has begun. `flush`: what it has written
    to Python's streams, too; a process that leaves those to its parent leaves their locks alone.
    """
    code: object = 0
    said = ""
    try:
        work()
    except SystemExit as ending:
        code = ending.code
        if not isinstance(code, int | None):
            said, code = f"{code}\n", 1
    except BaseException:  # noqa: BLE001 - told, as a program's own end would be
        said, code = traceback.format_exc(), 1
    if flush:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    with contextlib.suppress(OSError):
        os.write(2, said.encode(errors="replace"))
    os._exit(code if isinstance(code, int) else 0)

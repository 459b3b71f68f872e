"""The programs of an actor: started, limited, supervised and ended by a supervisor of its own
(`supervisor.py`), which needs no import for each and outlives the actor just long enough to end
them all. What a program is given, and how it says its result: docs/environments.md.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from actors.errors import ProgramFailed
from actors.gateway.protocol import ResultRequest
from actors.gateway.sessions import Result
from actors.gateway.warden import ENDED, LATE
from configs.environment import PROGRAM, ProgramConfig
from configs.load import ConfigError
from configs.schema import Config

_LOADED_WITHIN_S = 120.0  # an entry point may import much
_TOLD_WITHIN_S = 30.0  # how a program ended, once it has to
_CLOSED_WITHIN_S = 10.0
_SHOWN = 300  # characters of what a program said
# Of the actor's environment: where things lie, and the run's mark, by which its guardian finds
# whatever is left when the run is killed. Nothing that may be a secret.
_HANDED_ON = (
    *("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH"),
    *("PYTHONPATH", "SHELL", "TERM", "TZ", "USER", "VIRTUAL_ENV", "FORAGE_RUN", "FORAGE_TESTS"),
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Ended(msgspec.Struct, frozen=True):
    """The end of a program. `status`: its exit status, or, negative, the signal that ended it;
    `left`: the processes that it left behind; `output`, `errors`: the ends of what it said.
    """

    cause: str
    status: int
    left: int
    output: str
    errors: str

    def fault(self, settings: ProgramConfig) -> str:
        """Why it is no program that ended well; '' for one that is."""
        if self.cause == LATE:
            return f"it took over {settings.deadline_s:g} s (environment.program.deadline_s)"
        if self.cause != ENDED:
            return "it was given up"
        if not self.status:
            return ""
        how = f"exit status {self.status}" if self.status > 0 else f"signal {-self.status}"
        last = self.errors.strip().rpartition("\n")[2][-_SHOWN:]
        return f"it ended with {how}{f': {last}' if last else ''}"


class Programs:
    """Runs programs, `environment.program.at_once` of them; use as `async with`."""

    def __init__(self, settings: ProgramConfig) -> None:
        self._settings = settings
        self._places = asyncio.Semaphore(settings.at_once)
        self._starting = asyncio.Lock()
        self._supervisor: _Supervisor | None = None
        self._leaving: list[_Supervisor] = []  # earlier ones, closed; dead, or soon to be
        self._running = self._begun = self._late = self._failed = self._left = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the supervisor, with whatever still runs."""
        if self._supervisor is not None:
            self._drop(self._supervisor)
        for each in self._leaving:
            await asyncio.to_thread(each.end)

    async def run(self, question: str, environment: Mapping[str, str]) -> Ended:
        """Run one program; `question`: what it reads on standard input, or as its argument; it is
        over, with all that it has started, when this returns or is cancelled. Raises ProgramFailed
        where nobody can tell how it ended.
        """
        async with self._places:
            self._begun += 1
            self._running += 1
            try:
                ended = await self._run(question, environment)
            except ProgramFailed:
                self._failed += 1
                raise
            finally:
                self._running -= 1
        self._late += ended.cause == LATE
        self._failed += bool(ended.fault(self._settings))
        self._left += ended.left
        return ended

    def gauges(self) -> dict[str, float]:
        """Return counts since the start, and the number of programs that run."""
        return {
            "actor/programs_running_count": float(self._running),
            "actor/programs_begun_total": float(self._begun),
            "actor/programs_failed_total": float(self._failed),
            "actor/programs_late_total": float(self._late),
            "actor/programs_left_behind_total": float(self._left),
        }

    async def _run(self, question: str, environment: Mapping[str, str]) -> Ended:
        ours, theirs = socket.socketpair()
        try:
            supervisor = await self._hand_over(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(self._request(question, environment))
            told = await self._told(reader, writer)
        finally:
            writer.close()
        if not told:
            if supervisor.ended:
                self._drop(supervisor)
            raise ProgramFailed("what supervises it was killed: nobody can tell how it ended")
        return msgspec.json.decode(told, type=Ended)

    def _request(self, question: str, environment: Mapping[str, str]) -> bytes:
        asked = self._settings
        request = {
            "command": asked.command,
            "question": question,
            "environment": {**environment_of(asked), **environment},
            "deadline_s": asked.deadline_s,
            "grace_s": asked.grace_s,
            "memory_bytes": asked.memory_mb << 20,
            "file_bytes": asked.file_mb << 20,
            "output_bytes": asked.output_bytes,
        }
        return json.dumps(request).encode() + b"\n"

    async def _told(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Wait until all of the program is over; ask for that where the caller leaves."""
        reading = asyncio.ensure_future(reader.read())
        asked = self._settings
        limit_s = asked.deadline_s + asked.grace_s + _TOLD_WITHIN_S
        try:
            await asyncio.wait({reading}, timeout=limit_s)
            if reading.done():
                return reading.result()
            raise ProgramFailed(f"nobody told its end within {limit_s:g} s")
        except asyncio.CancelledError:
            with suppress(OSError):
                writer.write_eof()
            await asyncio.wait({reading}, timeout=asked.grace_s + _TOLD_WITHIN_S)
            raise
        except ConnectionError:
            return b""
        finally:
            reading.cancel()

    async def _hand_over(self, connection: socket.socket) -> "_Supervisor":
        """Give the supervisor, which is started where there is none, a program's connection."""
        async with self._starting:
            for _ in range(2):
                if self._supervisor is None:
                    self._supervisor = await asyncio.to_thread(_Supervisor, self._settings)
                with suppress(OSError):
                    self._supervisor.give(connection)
                    return self._supervisor
                self._drop(self._supervisor)
        raise ProgramFailed("the supervisor of programs takes none")

    def _drop(self, supervisor: "_Supervisor") -> None:
        if self._supervisor is supervisor:
            self._supervisor = None
            supervisor.close()
            self._leaving.append(supervisor)


class _Supervisor:
    """A supervisor's process. Raises ProgramFailed where its entry point cannot be loaded."""

    def __init__(self, settings: ProgramConfig) -> None:
        self._folders = ""
        self._control, theirs = socket.socketpair()
        words = [sys.executable, "-m", "actors.gateway.supervisor", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*words, *filter(None, [settings.entry_point])],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the log of the actor
                env=environment_of(settings),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            fault = self._hello()
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._control.close()
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

    def end(self) -> None:
        """Close it and wait for its end."""
        self.close()
        try:
            self._process.wait(_CLOSED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._folders:  # of one that was killed
            shutil.rmtree(self._folders, ignore_errors=True)

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


def environment_of(settings: ProgramConfig) -> dict[str, str]:
    """Return what programs are given of this process's environment."""
    names = [*_HANDED_ON, *settings.variables]
    given = {name: os.environ[name] for name in names if name in os.environ}
    return dict.fromkeys(_ONE_THREAD, "1") | given


def result_of(ended: Ended) -> Result:
    """Return the result on the last line that a program has printed; an empty one where it printed
    nothing. Raises ProgramFailed.
    """
    line = ended.output.strip().rpartition("\n")[2]
    if not line:
        return Result(None, None)
    try:
        said = msgspec.json.decode(line, type=ResultRequest)
    except msgspec.DecodeError as error:
        raise ProgramFailed(
            f"its last line is no result ({error}): {line[:_SHOWN]!r}: print one line of JSON, "
            '{"answer": TEXT, "reward": NUMBER}, at the end'
        ) from error
    return Result(said.answer, said.reward)


def check(config: Config) -> None:
    """Raise ConfigError, naming the field, where the environment is a program that could not be
    run.
    """
    if config.environment.name != PROGRAM:
        return
    asked, limit_s = config.environment.program, config.actors.rollout_deadline_s
    if asked.deadline_s + asked.grace_s >= limit_s:
        raise ConfigError(
            f"environment.program.deadline_s = {asked.deadline_s:g}: a rollout is given up after "
            f"actors.rollout_deadline_s = {limit_s:g}, its end ({asked.grace_s:g} s) included: "
            "lower the former or raise the latter"
        )
    for name in asked.variables:
        if name not in os.environ:
            raise ConfigError(
                f"environment.program.variables = {name!r}: there is no such variable here: set "
                "it where the actors run, or leave it out"
            )
    if asked.command:
        _check_command(asked.command, environment_of(asked).get("PATH"))
        return
    try:
        _Supervisor(asked).end()
    except ProgramFailed as error:
        raise ConfigError(
            f"environment.program.entry_point = {asked.entry_point!r}: {error}"
        ) from error


def _check_command(words: tuple[str, ...], path: str | None) -> None:
    program, *others = words
    if shutil.which(program, path=path) is None:
        there = Path(program).is_file()
        lacks = "there is no such program: install it"
        wrong = "it may not be executed: chmod +x" if there else lacks
        if not there and len(split := program.split()) > 1:
            wrong = f"no shell reads it: write a list of words, [{','.join((*split, *others))}]"
        raise ConfigError(f"environment.program.command = {program!r}: {wrong}, or name another")
    for word in (program, *others):
        if Path(word).is_file() and not Path(word).is_absolute():
            raise ConfigError(
                f"environment.program.command = {word!r}: each program runs in an empty folder of "
                f"its own, where there is no such file: name {str(Path(word).resolve())!r}"
            )

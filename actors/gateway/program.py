"""The programs of an actor: started, limited, supervised and ended by a supervisor of its own
(`supervisor.py`), which needs no import for each and outlives the actor just long enough to end
them all. What a program is given, and how it says its result: docs/environments.md.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Self

import msgspec

from actors.errors import ProgramFailed
from actors.gateway.protocol import ResultRequest
from actors.gateway.sessions import Result
from actors.gateway.supervisor_process import SupervisorProcess, environment_of, settings_of
from actors.gateway.warden import ENDED, LATE
from configs.environment import PROGRAM, ProgramConfig
from configs.load import ConfigError
from configs.schema import Config

_BEGUN_WITHIN_S = 30.0  # a program, once its supervisor has been asked
_TOLD_WITHIN_S = 30.0  # how a program ended, once it has to
_JSON_BYTES = 6  # at most, of a byte that was said
_SHOWN = 300  # characters of what a program said
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.M)  # of a traceback


class Ended(msgspec.Struct, frozen=True):
    """The end of a program. `status`: its exit status, or, negative, the signal that ended it;
    `left`: the processes that it left behind; `output`: a function's value, or the end of what a
    command, and all that it had started, had printed when it ended; `errors`: the end of what was
    said on standard error; `cut`: the output begins within a line.
    """

    cause: str
    status: int
    left: int
    output: str
    errors: str
    cut: bool = False

    def fault(self, settings: ProgramConfig) -> str:
        """Why it is no program that ended well; '' for one that is."""
        if self.cause == LATE:
            limit_s = settings.deadline_s
            return f"the program took over {limit_s:g} s (environment.program.deadline_s)"
        if self.cause != ENDED:
            return "the program was given up"
        if not self.status:
            return ""
        how = f"exit status {self.status}" if self.status > 0 else f"signal {-self.status}"
        last = self.errors.strip().rpartition("\n")[2][-_SHOWN:]
        said = f": {last}{_raised_at(self.errors, settings)}" if last else ""
        return f"the program ended with {how}{said}"


class Programs:
    """Runs programs, `environment.program.at_once` of them; use as `async with`."""

    def __init__(self, settings: ProgramConfig) -> None:
        self._settings = settings
        self._places = asyncio.Semaphore(settings.at_once)
        self._starting = asyncio.Lock()
        self._supervisor: SupervisorProcess | None = None
        self._leaving: list[SupervisorProcess] = []  # earlier ones, closed; dead, or soon to be
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

    def refuse(self, ended: Ended) -> None:
        """Count a program as failed that ended well, and yet came to nothing of use."""
        self._failed += not ended.fault(self._settings)

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
        most = _JSON_BYTES * (self._settings.output_bytes + (1 << 16))
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=most)
        try:
            writer.write(self._request(question, environment))
            told = await self._told(supervisor, reader, writer)
        finally:
            writer.close()
        if not told.endswith(b"\n"):
            if supervisor.ended:
                self._drop(supervisor)
            raise ProgramFailed("what supervises it was killed: nobody can tell how it ended")
        return msgspec.json.decode(told, type=Ended)

    def _request(self, question: str, environment: Mapping[str, str]) -> bytes:
        asked = self._settings
        request = {
            **settings_of(asked),
            "command": asked.command,
            "question": question,
            "environment": {**environment_of(asked), **environment},
            "deadline_s": asked.deadline_s,
            "output_bytes": asked.output_bytes,
        }
        return json.dumps(request).encode() + b"\n"

    async def _told(
        self,
        supervisor: SupervisorProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bytes:
        """Wait until all of the program is over; ask for that where the caller leaves."""
        begun = asyncio.get_running_loop().create_future()
        telling = asyncio.ensure_future(_telling(reader, begun))
        asked = self._settings
        limit_s = asked.deadline_s + asked.grace_s + _TOLD_WITHIN_S
        try:
            await asyncio.wait({begun}, timeout=_BEGUN_WITHIN_S)
            if not begun.done():
                raise ProgramFailed(f"it was not begun within {_BEGUN_WITHIN_S:g} s")
            await asyncio.wait({telling}, timeout=limit_s)
            if not telling.done():
                raise ProgramFailed(f"nobody told its end within {limit_s:g} s")
            return telling.result()
        except asyncio.CancelledError:
            with suppress(OSError):
                writer.write_eof()
            await asyncio.wait({telling}, timeout=asked.grace_s + _TOLD_WITHIN_S)
            raise
        finally:
            if not telling.done():
                telling.cancel()
                self._end(supervisor, begun.result() if begun.done() else 0)

    def _end(self, supervisor: SupervisorProcess, warden: int) -> None:
        """End a warden that hangs, or, where it was not begun, the supervisor: it hangs, and the
        wardens of others see to their programs without it.
        """
        if warden:
            with suppress(ProcessLookupError):
                os.kill(warden, signal.SIGKILL)
        else:
            supervisor.kill()
            self._drop(supervisor)

    async def _hand_over(self, connection: socket.socket) -> SupervisorProcess:
        """Give the supervisor, which is started where there is none, a program's connection."""
        async with self._starting:
            for _ in range(2):
                if self._supervisor is None:
                    self._supervisor = await asyncio.to_thread(SupervisorProcess, self._settings)
                with suppress(OSError):
                    self._supervisor.give(connection)
                    return self._supervisor
                self._drop(self._supervisor)
        raise ProgramFailed("the supervisor of programs takes none")

    def _drop(self, supervisor: SupervisorProcess) -> None:
        if self._supervisor is supervisor:
            self._supervisor = None
            supervisor.close()
            self._leaving.append(supervisor)


async def _telling(reader: asyncio.StreamReader, begun: "asyncio.Future[int]") -> bytes:
    """Read the two lines of a warden; `begun` becomes its number, or 0 where it has ended."""
    try:
        begun.set_result(int(await reader.readline() or b"0"))
        return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        if not begun.done():
            begun.set_result(0)


def _raised_at(errors: str, settings: ProgramConfig) -> str:
    """The line of the program's own file, else of any, at which the traceback that ends its errors
    passed last, as ' (file.py:LINE)'; '' where they end otherwise.
    """
    *before, _ = errors.strip().split("\n")
    frames = "\n".join(takewhile(lambda line: line.startswith("  "), reversed(before)))
    places = [(Path(file).name, line) for file, line in _FRAME.findall(frames)]
    entry_point = settings.entry_point.rpartition(":")[0]
    named = [Path(word).name for word in settings.command or [entry_point]]
    own = {*named, f"{entry_point.rpartition('.')[2]}.py"}
    found = next((each for each in places if each[0] in own), places[0] if places else None)
    return f" ({found[0]}:{found[1]})" if found else ""


def shown(settings: ProgramConfig) -> str:
    """The field that names the program, and its value."""
    if settings.entry_point:
        return f"environment.program.entry_point = {settings.entry_point!r}"
    return f"environment.program.command = {list(settings.command)!r}"[:_SHOWN]


def result_of(ended: Ended) -> Result:
    """Return the result on the last line that a program has printed, or a function's value; an
    empty one where there is none. Raises ProgramFailed.
    """
    _, whole, line = ended.output.rstrip().rpartition("\n")
    if ended.cut and not whole:
        raise ProgramFailed(
            "its last line is longer than environment.program.output_bytes: print a shorter one at "
            f"the end, or raise that: …{line[-_SHOWN:]!r}"
        )
    if not line.strip():
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
        SupervisorProcess(asked).end()
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

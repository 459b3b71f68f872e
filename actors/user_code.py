"""A user's own code: callables that the configuration names as `package.module:name`, called so
that their faults harm nothing else.

Plain functions run in daemon threads. Nothing can end a thread, so a call that its caller abandons
goes on; the number of such calls is bounded.
"""

import asyncio
import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from configs.load import ConfigError

# Raised by a user's code; by its own fault where `raise_if_cancelled` lets it pass.
FAULTS = (Exception, SystemExit, asyncio.CancelledError)
Ended = tuple[Any, BaseException | None]


class StillRunning(Exception):
    """Too many abandoned calls have not ended: no other is begun."""


class Turns:
    """The calls that there may be at once: enter one for each. An abandoned call keeps its turn
    until its thread ends; the last turn is never kept, so that who waits is told StillRunning.
    """

    def __init__(self, at_once: int) -> None:
        self._free, self._most_kept = asyncio.Semaphore(at_once), at_once - 1
        self._abandoned = self._kept = 0

    async def __aenter__(self) -> None:
        await self._free.acquire()

    async def __aexit__(self, *raised: object) -> None:
        self._keep(self._kept + 1)

    def abandon(self) -> None:
        """Note that the caller of a thread leaves, whose turn then stays taken."""
        self._abandoned += 1

    def end(self) -> None:
        """Note that the thread of an abandoned call has ended."""
        self._abandoned -= 1
        self._keep(self._kept)

    def _keep(self, held: int) -> None:
        """Keep of the turns that are held as many as must be."""
        self._kept = max(0, min(self._abandoned, self._most_kept, held))
        for _ in range(held - self._kept):
            self._free.release()


class Threads:
    """Begins threads called `name`; `max_abandoned` bounds the abandoned calls that still run."""

    def __init__(self, name: str, max_abandoned: int) -> None:
        self._name, self.max_abandoned = name, max_abandoned
        self._abandoned: list[threading.Thread] = []

    @property
    def turns(self) -> Turns:
        """The calls that there may be at once in this loop, where a caller takes turns."""
        return _turns(self, asyncio.get_running_loop())

    async def run(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        """Return the result of an async function, or of a plain one in a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*given, **named)
        value = await self.call(function, *given, **named)
        return await value if inspect.isawaitable(value) else value

    async def call(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        """Return a plain function's result. Raises whatever it raises, or StillRunning."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= self.max_abandoned:
            raise StillRunning(f"{len(self._abandoned)} earlier calls, given up, are still running")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Ended] = loop.create_future()
        turns = self.turns

        def work() -> None:
            value, error = _called(partial(function, *given, **named))
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(_settle, ended, (value, error), turns)

        thread = threading.Thread(target=work, name=self._name, daemon=True)
        thread.start()
        try:
            value, error = await ended
        except asyncio.CancelledError:
            if ended.cancelled():
                self._abandoned.append(thread)
                turns.abandon()
            raise
        if error is not None:
            raise error
        return value


@lru_cache(1024)
def _turns(threads: Threads, loop: asyncio.AbstractEventLoop) -> Turns:
    return Turns(threads.max_abandoned)


def load_entry_point(field: str, value: str) -> Callable[..., Any]:
    """Import the callable that `value` names. Raises ConfigError, naming the field."""
    module_name, _, name = value.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{field} = {value!r}: {module_name} cannot be imported: {type(error).__name__}: "
            f"{error}{_remedy(module_name, error)}"
        ) from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ConfigError(f"{field} = {value!r}: {error}: name what that module holds") from error
    if not callable(found):
        raise ConfigError(f"{field} = {value!r}: a {type(found).__name__} cannot be called")
    return found  # type: ignore[no-any-return]


def _remedy(module_name: str, error: Exception) -> str:
    """Return what to do where a module cannot be imported; first the line that raised it."""
    if not isinstance(error, ModuleNotFoundError):
        passed = traceback.extract_tb(error.__traceback__)
        own = f"{module_name.rpartition('.')[2]}.py"
        lines = [frame.lineno for frame in passed if Path(frame.filename).name == own]
        return f"{f' ({own}:{lines[-1]})' if lines else ''}: correct it"
    if f"{module_name}.".startswith(f"{error.name}."):  # itself, or a package that it is in
        return (
            f": put PYTHONPATH=$PWD before the command in the folder that holds "
            f"{module_name.partition('.')[0]}, or install it in this environment: each process of "
            "a run imports it"
        )
    return ": install what it imports in this environment, or add its folder to PYTHONPATH"


def raise_if_cancelled(error: BaseException) -> None:
    """Raise the error again where it is a cancellation of the current task. A CancelledError that a
    user's code lets out, of a task of its own, is that code's error.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def raised_at(entry_point: str, error: BaseException) -> str:
    """Return the line in the file of `package.module:name` that an error came from, as
    ' (file.py:LINE)'; '' where it never passed through there.
    """
    module = sys.modules.get(entry_point.partition(":")[0])
    own = getattr(module, "__file__", None)
    passed = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in passed if own and frame.filename == own]
    return f" ({Path(str(own)).name}:{lines[-1]})" if lines else ""


def _called(function: Callable[[], Any]) -> Ended:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - raised again by `call`
        return None, error


def _settle(future: "asyncio.Future[Ended]", ended: Ended, turns: Turns) -> None:
    if future.done():  # cancelled: its caller has left
        turns.end()
    else:
        future.set_result(ended)

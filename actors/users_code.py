"""A user's own code, called so that its faults harm nothing else: plain functions run in daemon
threads.

Nothing can end a thread, so a call that its caller abandons goes on; their number is bounded.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# What such code may raise; after `raise_if_cancelled`, by its own fault.
FAULTS = (Exception, SystemExit, asyncio.CancelledError)
Ended = tuple[Any, BaseException | None]


class StillRunning(Exception):
    """Too many abandoned calls have not ended: no other is begun."""


class Threads:
    """Begins threads called `name`; `max_abandoned` bounds the abandoned calls that still run."""

    def __init__(self, name: str, max_abandoned: int) -> None:
        self._name, self._max_abandoned = name, max_abandoned
        self._abandoned: list[threading.Thread] = []

    async def run(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Return the result of an async function, or of a plain one in a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(argument)
        value = await self.call(function, argument)
        return await value if inspect.isawaitable(value) else value

    async def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Return a plain function's result. Raises its errors, whatever they are, or StillRunning."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= self._max_abandoned:
            raise StillRunning(f"{len(self._abandoned)} earlier calls, given up, are still running")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Ended] = loop.create_future()

        def work() -> None:
            value, error = _called(function, argument)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(_settle, ended, (value, error))

        thread = threading.Thread(target=work, name=self._name, daemon=True)
        thread.start()
        try:
            value, error = await ended
        except asyncio.CancelledError:
            self._abandoned.append(thread)
            raise
        if error is not None:
            raise error
        return value


def raise_if_cancelled(error: BaseException) -> None:
    """Raise the error again where it is a cancellation of the current task. A CancelledError that a
    user's code lets out, of a task of its own, is that code's error.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def _called(function: Callable[[Any], Any], argument: Any) -> Ended:
    try:
        return function(argument), None
    except BaseException as error:  # noqa: BLE001 - raised again by `call`
        return None, error


def _settle(future: "asyncio.Future[Ended]", ended: Ended) -> None:
    if not future.done():
        future.set_result(ended)

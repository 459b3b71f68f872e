"""A user's own code, called so that what it does wrong harms nobody else.

Consumes a plain function and its argument; produces what it returns or raises, from a thread that
keeps no process alive. Waits for the function as long as its caller does; unblocked by its end, or
by the caller's deadline. A call that its caller gives up goes on in its thread, since nothing can
end it: so many of them, and no more.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# What such code may raise; after `raise_if_cancelled`, by its own fault.
FAULTS = (Exception, SystemExit, asyncio.CancelledError)
Ended = tuple[Any, BaseException | None]


class StillRunning(Exception):
    """As many calls as may be were given up by their callers and have not ended: no other is
    begun.
    """


class Threads:
    """Begins threads called `name`; `most_left`: how many calls that were given up may go on."""

    def __init__(self, name: str, most_left: int) -> None:
        self._name, self._most_left = name, most_left
        self._left: list[threading.Thread] = []

    async def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """What the function returns. Raises what it raises, whatever that is, and StillRunning."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= self._most_left:
            raise StillRunning(f"{len(self._left)} earlier calls, given up, are still running")
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
            self._left.append(thread)
            raise
        if error is not None:
            raise error
        return value


def raise_if_cancelled(error: BaseException) -> None:
    """Raise the error again where it is a cancellation of the task that runs; one that a user's
    code lets out, of a task of its own, is an error of that code.
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

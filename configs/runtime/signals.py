"""Signals that ask a process to stop: one for loops and tasks, one for long waits."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Exception):
    """Somebody asked this process to stop; the message says who or how."""


class StopSwitch:
    """A handler for `configs.runtime.process.on_stop`; waits are wrapped in `interruptible`."""

    def __init__(self) -> None:
        self._cause = ""
        self._waiting = False

    def __call__(self, cause: str) -> None:
        """Ask for the stop. Raises StopRequested in the interrupted code if that is a wait."""
        self._cause = self._cause or cause
        if self._waiting:
            self._waiting = False  # a second signal must not tear up the orderly end
            raise StopRequested(self._cause)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a stop end this wait. Raises StopRequested at once if the stop came before."""
        self._waiting = True  # first: a signal after the look at the cause must not be missed
        try:
            if self._cause:
                raise StopRequested(self._cause)
            yield
        finally:
            self._waiting = False


class Interrupt:
    """Ctrl-C or SIGTERM; `cause` is the signal's name, '' before. Use as a context manager.

    The first one cancels the task that asked for it, or raises KeyboardInterrupt where none has;
    where it is `polled`, whoever looks at `cause` ends in order. The second one always raises.
    """

    def __init__(self, polled: bool = False) -> None:
        self.cause = ""
        self._cancel: Callable[[], object] | None = (lambda: None) if polled else None

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """Take the signals (again: a library may have put its own handlers in the way)."""
        for number in _SIGNALS:
            signal.signal(number, self._take)

    def cancels_this_task(self) -> None:
        """Have a signal cancel the task that calls."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        again, self.cause = bool(self.cause), signal.Signals(number).name
        if again or self._cancel is None:
            raise KeyboardInterrupt
        self._cancel()

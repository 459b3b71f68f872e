"""Signals that ask a process to stop: for workers, for their long waits, and for commands.

    on_stop       a worker: calls back instead of dying
    StopSwitch    such a callback, which ends a wait at once and computation at its end
    Interrupt     a command: Ctrl-C once in order, twice at once; the handlers before come back
    MAKE_WAY      to an actor or a learner, whose node is to go: end while the run goes on

Python runs handlers on the main thread, between two instructions. A worker that waits in an event
loop has that loop take its signals instead (`add_signal_handler`), which wakes it.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# An actor's time to drain is over: what it has not done it gives back. A learner saves once its
# step is done, and leaves; another goes on with the run.
MAKE_WAY = signal.SIGUSR1


class StopRequested(Exception):
    """Somebody asked this process to stop; the message says who or how."""


def on_stop(callback: Callable[[str], None], *others: signal.Signals) -> None:
    """Call `callback(cause)`, a signal's name, on SIGTERM, SIGINT and `others` instead of dying."""
    for number in (*_SIGNALS, *others):
        signal.signal(number, lambda n, _frame: callback(signal.Signals(n).name))


class StopSwitch:
    """A callback for `on_stop`; waits are wrapped in `interruptible`."""

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

    The first one raises KeyboardInterrupt; where it is `polled`, whoever looks at `cause` ends in
    order instead. The second one always raises.
    """

    def __init__(self, polled: bool = False) -> None:
        self.cause = ""
        self._polled = polled

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

    def _take(self, number: int, _frame: FrameType | None) -> None:
        again, self.cause = bool(self.cause), signal.Signals(number).name
        if again or not self._polled:
            raise KeyboardInterrupt

"""A signal that ends waits at once, and computation at the next wait."""

from collections.abc import Iterator
from contextlib import contextmanager


class StopRequested(Exception):
    """Somebody asked this process to stop; the message says who or how."""


class StopSwitch:
    """A handler for `configs.process.on_stop`; waits are wrapped in `interruptible`."""

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

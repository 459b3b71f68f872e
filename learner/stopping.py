"""A signal stops the learner: at once where it only waits, after the step where it computes."""

from collections.abc import Iterator
from contextlib import contextmanager

from learner.errors import LearnerError


class StopRequested(LearnerError):
    """Somebody asked this process to stop; the text is who or how."""


class StopSwitch:
    """Give it to `configs.process.on_stop`; wrap waits in `interruptible`."""

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
        """A wait that a stop ends. Raises StopRequested at once if the stop came before."""
        self._waiting = True  # first: a signal after the look at the cause must not be missed
        try:
            if self._cause:
                raise StopRequested(self._cause)
            yield
        finally:
            self._waiting = False

"""A group is formed on a thread of its own, which alone waits for the other ranks."""

import threading
from collections.abc import Callable

from weight_sync.protocol import TransportFailed
from weight_sync.transport import Transport


class Forming(threading.Thread):
    """The forming of a group, on a thread: a collective waits for a rank that has died until its
    time is out. A caller that gives up earlier leaves the thread behind.
    """

    def __init__(self, epoch: int, form: Callable[[], Transport]) -> None:
        super().__init__(name="weight-group", daemon=True)
        self._epoch, self._form = epoch, form
        self._transport: Transport | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Reach the store, then every other rank."""
        try:
            self._transport = self._form()
        except Exception as error:  # noqa: BLE001 - raised again by `finish`
            self._error = error

    def done(self, within_s: float) -> bool:
        """Return True if forming ends, well or not, within so many seconds."""
        self.join(within_s)
        return not self.is_alive()

    def finish(self, deadline_s: float) -> Transport:
        """The group; raises what went wrong on the way, TransportFailed at the deadline."""
        self.join(deadline_s)
        if self._error is not None:
            raise self._error
        if self._transport is None:
            raise TransportFailed(
                f"epoch {self._epoch}: the group was not formed within {deadline_s:g} s"
            )
        return self._transport

"""Whether the disk has room for the event log, and for how long it has had none.

Consumes the log's refusals; says when to tell those who wait. Its wait has a deadline and a name.
"""

import logging

from replay.log import LogFull

TELL_EVERY_S = 1.0
LOG_EVERY_S = 10.0

logger = logging.getLogger(__name__)


class Room:
    """`full` and `cause` say what is missing; empty while the log can be written."""

    def __init__(self, deadline_s: float) -> None:
        self.cause = ""
        self._deadline_s = deadline_s
        self._since_s = self._told_s = self._logged_s = float("-inf")

    @property
    def full(self) -> bool:
        """The last attempt found no room."""
        return bool(self.cause)

    def missing(self, error: LogFull, now_s: float) -> bool:
        """Note a failed attempt; whether to tell who waits. Raises `error` at the deadline."""
        if not self.full:
            self._since_s = now_s
        if now_s - self._since_s >= self._deadline_s:
            raise error
        self.cause = f"the event log waits for room on the disk: {error}"
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            logger.error(
                "%s: free some, or the run ends in %.0f s (replay.disk_deadline_s)",
                self.cause, self._since_s + self._deadline_s - now_s,
            )  # fmt: skip
        tell = now_s - self._told_s >= TELL_EVERY_S
        self._told_s = now_s if tell else self._told_s
        return tell

    def found(self) -> None:
        """The log was written."""
        logger.warning("the event log has room again")
        self.cause = ""

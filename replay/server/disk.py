"""The disk's room for the event log, and the requests that wait while there is none."""

import logging
from collections import deque
from collections.abc import Container, Iterator

from replay.ledger.events import Peer
from replay.log.event_log import LogFull
from replay.protocol import Describe, FromActor, Heartbeat, Observe, Request
from replay.server.held import Bounds

TELL_EVERY_S = 1.0
LOG_EVERY_S = 10.0
MOST_TAKEN = 1_000  # requests between two answers
_ANSWERED_WHILE_FULL = Heartbeat | Observe | Describe

logger = logging.getLogger(__name__)
_Received = tuple[Peer, Request, int]  # the peer, what it asks, in so many bytes


class Disk:
    """The disk that the log is on, and the requests that have been read but not handled.

    `cause`: why the log cannot be written; empty while it can.
    """

    def __init__(self, deadline_s: float) -> None:
        self.cause = ""
        self._deadline_s = deadline_s
        self._since_s = self._told_s = self._logged_s = float("-inf")
        self._inbox: deque[_Received] = deque()
        self._of_actors = Bounds("actors")

    @property
    def full(self) -> bool:
        """True where the last attempt to write found no room."""
        return bool(self.cause)

    @property
    def behind(self) -> bool:
        """True where more waits than is handled before the next answers are sent."""
        return self.full or len(self._inbox) > MOST_TAKEN

    def receive(self, peer: Peer, request: Request, size: int) -> None:
        """Take in a request that has arrived in so many bytes; while the log is full, of actors as
        many as can be held.
        """
        if isinstance(request, FromActor):
            if self.full and not self._of_actors.admits(peer, request, size):
                return
            self._of_actors.add(peer, request, size)
        self._inbox.append((peer, request, size))

    @property
    def more(self) -> bool:
        """True where some that can be handled were left for later."""
        return bool(self._inbox) and not self.full

    def requests(self, first: Container[Peer]) -> Iterator[tuple[Peer, Request]]:
        """Take out requests that can be handled, MOST_TAKEN at most: questions that change nothing,
        then those of the peers `first`, then all others. While the log is full, hold those that
        need it.
        """

        def later(received: _Received) -> tuple[bool, bool]:
            return not isinstance(received[1], Observe | Describe), received[0] not in first

        self._inbox = deque(sorted(self._inbox, key=later))
        held: list[_Received] = []
        taken = 0
        while self._inbox and taken < MOST_TAKEN:
            received = self._inbox.popleft()
            if self.full and not isinstance(received[1], _ANSWERED_WHILE_FULL):
                held.append(received)
            else:
                taken += 1
                yield self._taken(*received)
        self._inbox.extendleft(reversed(held))

    def requests_of(self, peer: Peer) -> list[Request]:
        """Take out all that `peer` has asked."""
        found = [received for received in self._inbox if received[0] == peer]
        self._inbox = deque(received for received in self._inbox if received[0] != peer)
        return [self._taken(*received)[1] for received in found]

    def waiting(self) -> set[Peer]:
        """Return the peers whose requests are not handled."""
        return {peer for peer, _, _ in self._inbox}

    def missing(self, error: LogFull, now_s: float) -> bool:
        """Note a failed attempt; True when it is time to tell. Raises `error` at the deadline."""
        if not self.full:
            self._since_s = now_s
        if now_s - self._since_s >= self._deadline_s:
            raise error
        self.cause = f"the event log waits for room on the disk: {error}"
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            logger.error(
                "%s: free some, or the run ends in %.0f s (replay.disk_deadline_s)",
                self.cause,
                self._since_s + self._deadline_s - now_s,
            )
        tell = now_s - self._told_s >= TELL_EVERY_S
        self._told_s = now_s if tell else self._told_s
        return tell

    def found(self) -> None:
        """Note that the log was written."""
        if self.full:
            logger.warning("the event log has room again")
            self.cause = ""

    def _taken(self, peer: Peer, request: Request, size: int) -> tuple[Peer, Request]:
        if isinstance(request, FromActor):
            self._of_actors.remove(peer, request, size)
        return peer, request

"""The bounds of what is held until it can be handled: so many requests, and so many bytes of them.

Beyond them what actors say is lost, and said again: their heartbeats, which are answered all the
same, tell of it. An actor that no Welcome answers says Hello each second: the first one counts.
"""

import logging

from replay.ledger.events import Peer
from replay.protocol import Hello, Request

MOST_HELD = 10_000  # requests
MOST_HELD_BYTES = 256 << 20  # a rollout of 2,000 tokens takes about 24 kB

logger = logging.getLogger(__name__)


class Bounds:
    """How many requests of `whose` are held, and how many bytes they came in."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._count = self._bytes = 0
        self._greeting: set[Peer] = set()  # of whom a Hello is held
        self._told = False

    def admits(self, peer: Peer, request: Request, size: int) -> bool:
        """True where this one, too, can be held."""
        if isinstance(request, Hello) and peer in self._greeting:
            return False
        fits = self._count < MOST_HELD and self._bytes + size <= MOST_HELD_BYTES
        if not fits and not self._told:
            self._told = True
            held = f"{self._count} requests of {self._whose}, {self._bytes} bytes, are held"
            logger.warning("%s: more are lost", held)
        return fits

    def add(self, peer: Peer, request: Request, size: int) -> None:
        """Count one that is held from now on."""
        self._count += 1
        self._bytes += size
        if isinstance(request, Hello):
            self._greeting.add(peer)

    def remove(self, peer: Peer, request: Request, size: int) -> None:
        """Count one no more."""
        self._count -= 1
        self._bytes -= size
        self._told = self._told and bool(self._count)
        if isinstance(request, Hello):
            self._greeting.discard(peer)

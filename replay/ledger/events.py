"""Events that go into the ledger, and outcomes that come out of it.

A peer is the opaque address of a connection (the server uses the socket's routing id, for actors,
learner and launcher alike). The ledger itself remembers which peer an actor spoke from in its
`Hello`; replies and pushed leases are addressed to peers, so the server looks into no message.
"""

import msgspec

from replay.log.records import Record
from replay.protocol import Decided, Reply

Peer = bytes | str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: deadlines are looked at. Sent by the server ten times a second."""


class PeerLost(msgspec.Struct, frozen=True):
    """The connection of the event's peer is dead, or silent for `replay.dead_after_s`."""

    cause: str = "actor_lost"


class Event(msgspec.Struct, frozen=True):
    """A request, or a fact that the server noticed, and its peer (ignored for `Tick`)."""

    peer: Peer
    message: Decided | Tick | PeerLost


class Outcome(msgspec.Struct, frozen=True):
    """Records to append, then replies to send: nothing is acknowledged before it is written."""

    records: tuple[Record, ...]
    replies: tuple[tuple[Peer, Reply], ...]

"""The actors connected now: live state, never recorded, rebuilt from their Hello and Ready."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from replay.ledger.events import Peer


@dataclass
class Actor:
    """An actor that has said hello; `incarnation` −1 until it has stated its weights.

    `unsettled`: the leases and deliveries, (group_id, sibling), that it and the record do not agree
    about, and since when; `doubted`: for so long that a message was lost, and until it says hello.
    """

    actor_id: str
    peer: Peer
    instance: str = ""
    node: str = ""
    capacity: int = 0
    incarnation: int = -1
    version: int = -1
    gauges: dict[str, float] = field(default_factory=dict)
    unsettled: dict[tuple[int, int], float] = field(default_factory=dict)
    doubted: bool = False

    def settle(self, keys: set[tuple[int, int]], now: float, limit_s: float) -> None:
        """Note what is on its way, or lost: doubt the actor's story where one stays `limit_s`."""
        self.unsettled = {key: self.unsettled.get(key, now) for key in keys}
        self.doubted = any(now - since >= limit_s for since in self.unsettled.values())


class Roster:
    """The connected actors, by id and by peer."""

    def __init__(self) -> None:
        self._actors: dict[str, Actor] = {}

    def __iter__(self) -> Iterator[Actor]:
        return iter(self._actors.values())

    def __contains__(self, actor_id: object) -> bool:
        return actor_id in self._actors

    def get(self, actor_id: str) -> Actor | None:
        """Return the connected actor of this name."""
        return self._actors.get(actor_id)

    def at(self, peer: Peer) -> Actor | None:
        """Return the actor that speaks from this peer."""
        return next((actor for actor in self if actor.peer == peer), None)

    def join(self, actor_id: str, peer: Peer, instance: str = "", node: str = "") -> Actor:
        """Take an actor in; what it said before counts no more."""
        self._actors[actor_id] = Actor(actor_id, peer, instance, node)
        return self._actors[actor_id]

    def leave(self, actor_id: str) -> None:
        """Forget an actor."""
        self._actors.pop(actor_id, None)

    def fleet(self) -> dict[str, dict[str, float]]:
        """Return each actor's latest gauges."""
        return {actor.actor_id: actor.gauges for actor in self}

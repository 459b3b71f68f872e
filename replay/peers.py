"""Who is connected to replay's server, and what it still owes them. Pure: times are given.

Consumes what the server received and sent; produces who is silent, what is told again, and whether
the server may leave. Waits for nothing. Times are monotonic seconds.
"""

import msgspec

from configs.schema import Config
from replay.events import Peer
from replay.protocol import Decided, Finish, FromActor, Goodbye, Reply, Resume, Wait

WAIT_AGAIN_S = 0.5
QUIET_S = 2.0  # after the end, the console may still ask
GRACE_S = 5.0  # beyond the actors' own drain deadline


class Kept(msgspec.Struct, frozen=True):
    """A learner's question that was answered with Wait, and when."""

    request: Decided
    told: Wait
    at_s: float


class Said(msgspec.Struct, frozen=True):
    """When a connection was last heard, and as whom it spoke."""

    at_s: float
    actor_id: str


class Peers:
    """When each actor's connection was last heard, and the questions kept for an answer."""

    def __init__(self, config: Config, learning: bool = False) -> None:
        """`learning`: a learner has resumed before replay was started again."""
        self.actors: dict[Peer, Said] = {}
        self.kept: dict[Peer, Kept] = {}
        self._dead_after_s = config.replay.dead_after_s
        self._drain_s = config.actors.drain_deadline_s + GRACE_S
        self._step_s = config.learner.step_deadline_s
        self._learning = learning
        self._spoken_s = float("-inf")
        self._stopped_s = float("inf")

    def heard(self, peer: Peer, request: Decided, now_s: float) -> None:
        """Note that `peer` sent `request`; a new question replaces the one kept for it."""
        self._spoken_s = now_s
        self.kept.pop(peer, None)
        if isinstance(request, Goodbye):
            self.actors.pop(peer, None)
        elif isinstance(request, FromActor):
            self.actors[peer] = Said(now_s, request.actor_id)
        elif isinstance(request, Resume | Finish):
            self._learning = isinstance(request, Resume)

    def answers(self, peer: Peer, request: Decided, reply: Reply, now_s: float) -> bool:
        """Whether to send `reply`; a Wait is kept, and told again only when it is news."""
        if not isinstance(reply, Wait):
            self.kept.pop(peer, None)
            return True
        kept = self.kept.get(peer)
        if kept and kept.told.oldest == reply.oldest and now_s - kept.at_s < WAIT_AGAIN_S:
            return False
        self.kept[peer] = Kept(request, reply, now_s)
        return True

    def called(self, actor_id: str | None) -> list[Peer]:
        """The connections of actors that speak under this name; None: of all actors."""
        return [p for p, said in self.actors.items() if actor_id in (None, said.actor_id)]

    def silent(self, now_s: float) -> list[Peer]:
        """Actors not heard for `replay.dead_after_s`."""
        return [p for p, said in self.actors.items() if now_s - said.at_s > self._dead_after_s]

    def stopping(self, now_s: float) -> None:
        """Note that the run is over: from here on the server lingers."""
        self._stopped_s = min(self._stopped_s, now_s)

    def may_leave(self, signalled: bool, now_s: float, awaited: bool = False) -> bool:
        """Whether all have left, or have had their time; `awaited`: an actor may come back.

        A learner that has not finished is given its step's deadline; once a signal says that the
        rest is gone (`signalled`), only actors that are here are waited for.
        """
        learning = self._learning and not signalled
        limit_s = self._drain_s + (self._step_s if learning else 0.0)
        quiet = signalled or (now_s - self._spoken_s > QUIET_S and not awaited)
        gone = not self.actors and not learning and quiet
        return now_s >= self._stopped_s and (gone or now_s - self._stopped_s > limit_s)

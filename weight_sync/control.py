"""What the broadcast needs of where it stands: a control socket, and the learner's own place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weight_sync.protocol import FromActor, FromLearner


class Channel(Protocol):
    """What the broadcast needs of the control socket."""

    @property
    def peers(self) -> Sequence[str]:
        """Actors that have joined, sorted."""

    def send(self, actor_id: str, message: FromLearner) -> bool:
        """Send; False when the actor's connection is gone."""

    def drop(self, actor_id: str) -> None:
        """Forget an actor; it may join again."""

    def receive(self, deadline: float | None) -> FromActor | None:
        """The next message; None at the deadline (monotonic seconds) or when interrupted. A Join
        is of an actor that was not there, or came back on another connection.
        """


@dataclass(frozen=True)
class Place:
    """Where the learner is: `device` as `transport.device_name` says it, `address` where a store
    listens, `folder` where snapshots go.
    """

    device: str
    address: str
    folder: str

"""The control sockets of learner and actors. A Channel is all that the broadcast sees of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weight_sync.protocol import FromActor, FromLearner


class Channel(Protocol):
    """The learner's control socket, as the broadcast needs it."""

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
class LearnerHost:
    """The learner's `device` (see `device_name`), `address` for stores, `folder` for snapshots."""

    device: str
    address: str
    folder: str

"""The protocol as the learner speaks it: form the group once, then one version after another.

Consumes parcels and the actors' messages through a `Channel`; produces manifests, bytes over the
transport and the gauges of each completed version. Waits for every actor at each stage of the
protocol, with a deadline that names those who are silent; unblocked by their messages. Knows no
socket and no thread.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from configs.schema import WeightSyncConfig
from weight_sync import buckets
from weight_sync.protocol import (
    Applied,
    Connected,
    FromActor,
    FromLearner,
    Join,
    Receiving,
    Sent,
    SyncTimeout,
    WeightManifest,
    as_error,
)
from weight_sync.staging import Parcel
from weight_sync.transport import GlooTransport

log = logging.getLogger(__name__)


class Channel(Protocol):
    """What the broadcast needs of the control socket."""

    @property
    def peers(self) -> Sequence[str]:
        """Actors that have joined, sorted."""

    def send(self, actor_id: str, message: FromLearner) -> None:
        """Send; raises PeerFailed naming the actor."""

    def receive(self, deadline: float | None) -> FromActor | None:
        """The next message; None at the deadline (monotonic seconds) or when interrupted."""


class Broadcast:
    """Rank 0 of the collective and the talk around it; `say` is told what is being waited for."""

    def __init__(
        self,
        config: WeightSyncConfig,
        incarnation: int,
        channel: Channel,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._channel = channel
        self._say = say
        self._transport: GlooTransport | None = None
        self._first = True

    def form(self, actors: int, address: str) -> None:
        """Wait for `actors` joins, host the store at `address` and form the group with them.

        Unbounded by itself: the learner's thread bounds it (`Publisher.wait_for_actors`).
        """
        while len(self._channel.peers) < actors:
            self._say(f"actors to join: {_missing(self._channel.peers, actors)}")
            self._accept(None)
        peers, deadline_s = self._channel.peers, self._config.join_deadline_s
        prefix = f"forage/weight_sync/{self._incarnation}"
        self._transport = transport = GlooTransport.host(
            address, prefix, actors + 1, self._incarnation, deadline_s
        )
        for rank, actor_id in enumerate(peers, start=1):
            self._channel.send(actor_id, msgspec.structs.replace(transport.rendezvous, rank=rank))
        self._say(f"{', '.join(peers)} to form the gloo group")
        transport.form()
        self._gather(Connected, -1, deadline_s)
        log.info("gloo group formed with %s", ", ".join(peers))

    def send_version(self, parcel: Parcel) -> dict[str, float]:
        """Announce, send and have one version applied by every actor; returns its gauges.

        Raises what an actor reports, or SyncTimeout or TransportFailed; each names the actors.
        """
        assert self._transport is not None, "form() comes first"
        version, deadline_s = parcel.version, self._config.publish_deadline_s
        if self._first:  # an engine's first request can take as long as its start
            deadline_s, self._first = self._config.join_deadline_s, False
        self._tell_all(self._manifest(parcel))
        self._gather(Receiving, version, deadline_s)
        self._say(f"the broadcast of version {version} to {', '.join(self._channel.peers)}")
        begun = time.perf_counter()
        self._transport.broadcast(parcel.buckets, deadline_s)
        gauges = {"sync/broadcast_s": time.perf_counter() - begun}
        self._tell_all(Sent(self._incarnation, version))
        applied = self._gather(Applied, version, deadline_s)
        for name in ("generation_pause_s", "receive_s", "apply_s", "probe_error"):
            gauges[f"sync/{name}"] = max(getattr(each, name) for each in applied)
        return gauges

    def close(self) -> None:
        """Leave the group."""
        if self._transport is not None:
            self._transport.close()

    def _manifest(self, parcel: Parcel) -> WeightManifest:
        return WeightManifest(
            self._incarnation,
            parcel.version,
            parcel.specs,
            tuple(bucket.numel() for bucket in parcel.buckets),
            buckets.digest(parcel.buckets),
            parcel.probe_tokens,
            parcel.probe_logprobs,
            self._config.probe_tolerance,
        )

    def _tell_all(self, message: FromLearner) -> None:
        for actor_id in self._channel.peers:
            self._channel.send(actor_id, message)

    def _gather(self, kind: type, version: int, deadline_s: float) -> list[FromActor]:
        answers: dict[str, FromActor] = {}
        deadline = time.monotonic() + deadline_s
        of = f" of version {version}" if version >= 0 else ""
        while missing := [each for each in self._channel.peers if each not in answers]:
            what = f"{kind.__name__}{of} from {', '.join(missing)}"
            self._say(what)
            message = self._accept(deadline)
            if message is None and time.monotonic() >= deadline:
                raise SyncTimeout(f"the learner waited {deadline_s:g} s for {what}")
            if (
                message
                and isinstance(message, kind)
                and getattr(message, "policy_version", -1) == version
            ):
                answers[message.actor_id] = message
        return list(answers.values())

    def _accept(self, deadline: float | None) -> FromActor | None:
        message = self._channel.receive(deadline)
        if isinstance(message, Applied) and message.error:
            raise as_error(
                f"{message.error} ({message.actor_id}, version {message.policy_version}, probe "
                f"error {message.probe_error:.3g}, tolerance {self._config.probe_tolerance:g})"
            )
        if isinstance(message, Join):
            log.info("%s joined", message.actor_id)
        return message


def _missing(joined: Sequence[str], actors: int) -> str:
    """Who has not joined, by the names the launcher gives."""
    absent = [name for i in range(actors) if (name := f"actor-{i}") not in joined]
    return f"{', '.join(absent[: actors - len(joined)])} ({len(joined)} of {actors} joined)"

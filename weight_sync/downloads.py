"""Downloads: how actors of other nodes that come late get a version, beside the others' group.

The learner tells each what `Broadcast` tells a group, and waits for none: answers are taken as they
come, and nobody's broadcast stands still. Of a node one actor at a time downloads; whoever joins
there meanwhile reads what that one hands on. A download is over once all of its actors have applied
its version, at its deadline, or when its relay fails or leaves; what failed is tried again, and an
actor that fails again and again is refused alone. Sockets and threads are unknown here.
"""

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from configs.schema import WeightSyncConfig
from weight_sync.control import Channel, LearnerHost
from weight_sync.protocol import (
    Answer,
    Applied,
    Connecting,
    FromLearner,
    Ping,
    RelayFailed,
    Release,
    Rendezvous,
    Sent,
    SyncTimeout,
    TransportFailed,
    VerificationFailed,
    WeightManifest,
    as_error,
    describe,
)
from weight_sync.staging import Parcel
from weight_sync.transports.download import PATIENCE
from weight_sync.verification import REFITS

if TYPE_CHECKING:
    from weight_sync.transports.snapshot_server import SnapshotServer

log = logging.getLogger(__name__)

_LOOK_S = 5.0  # how often downloads are looked after; what an actor does not read yet stays short
_ATTEMPTS = 5  # of an actor, in a row


@dataclass
class _Download:
    """One node's: `where` is its relay's, `lacking` have not applied the version yet."""

    relay: str
    node: str
    where: Rendezvous
    manifest: WeightManifest
    end: float
    lacking: set[str] = field(default_factory=set)
    handing_on: bool = False  # the relay has made its folder


class Downloads:
    """All that are under way; `apart` are nodes on which handing on has failed, `refuse` is told of
    actors that must go, and why, `judge` says what is wrong with what one has applied.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        incarnation: int,
        learner_host: LearnerHost,
        channel: Channel,
        apart: set[str],
        refuse: Callable[[str, str], None],
        judge: Callable[[Applied], str],
    ) -> None:
        self._config, self._incarnation, self._host = config, incarnation, learner_host
        self._channel, self._apart, self._refuse, self._judge = channel, apart, refuse, judge
        self.usable = learner_host.serves and config.transport == "auto"
        self._server: SnapshotServer | None = None
        self._offered: tuple[WeightManifest, str] | None = None
        self._idle_s = self._looked_s = 0.0  # since when; the last time
        self._under_way: list[_Download] = []
        self._failures: dict[str, int] = {}  # in a row, by actor
        self._epochs = itertools.count(-2, -1)
        self._done = 0

    @property
    def names(self) -> set[str]:
        """The actors that have not applied what they download, or wait for."""
        return {name for each in self._under_way for name in each.lacking}

    def gauges(self) -> dict[str, float]:
        """How many actors have had a version by download, and the bytes sent for that."""
        sent = self._server.sent_bytes if self._server else 0
        return {"sync/downloads": float(self._done), "sync/downloaded_bytes": float(sent)}

    def begin(
        self,
        names: Sequence[str],
        nodes: Mapping[str, str],
        parcel: Parcel,
        manifest: Callable[[Parcel], WeightManifest],
    ) -> None:
        """Have these actors, of these nodes, download this version, or the one that others still
        do. Where it cannot be served, that is said, and `usable` ends.
        """
        try:
            offered, path = self._offer(parcel, manifest)
        except TransportFailed as error:
            self.usable = False
            log.warning("who joins late gets weights in a group from now on: %s", error)
            return
        for name in names:
            node = nodes[name]
            running = [d for d in self._under_way if d.node == node and d.where.hand_on]
            if running and node not in self._apart:
                running[0].lacking.add(name)
                if running[0].handing_on:
                    self._tell_reader(running[0], name)
            else:
                self._begin(name, node, offered, path)

    def takes(self, answer: Answer) -> bool:
        """Return True if an answer is of a download, perhaps of one that is over."""
        return answer.epoch < -1

    def hear(self, answer: Answer) -> bool:
        """Go on after an actor's answer; True where it has applied a version, verified."""
        name, found = answer.actor_id, self._of(answer)
        if found is None:
            return False
        error = getattr(answer, "error", "")
        if isinstance(answer, Applied) and not error and (wrong := self._judge(answer)):
            error = describe(VerificationFailed(wrong))
        if error:
            self._failed(found, name, error)
        elif isinstance(answer, Connecting):
            self._tell(name, found.manifest)
            if name == found.relay:
                found.handing_on = bool(found.where.hand_on)
                for each in sorted(found.lacking - {name}):
                    self._tell_reader(found, each)
        elif isinstance(answer, Applied):
            log.info("%s has version %d by download", name, answer.policy_version)
            self._failures.pop(name, None)
            self._done += 1
            found.lacking.discard(name)
            self._end_if_done(found)
            return True
        else:
            self._tell(name, Sent(self._incarnation, found.manifest.policy_version))
        return False

    def forget(self, name: str) -> None:
        """An actor has left, or come back anew."""
        for each in list(self._under_way):
            if name in each.lacking:
                self._lost(each, name)

    def next_look(self) -> float | None:
        """When `look` is due (monotonic seconds); None where there is nothing to look after."""
        return self._looked_s + _LOOK_S if self._under_way or self._offered else None

    def look(self, newest: int) -> None:
        """Drop who has left or is late; withdraw a snapshot of old that nobody asks for."""
        now = time.monotonic()
        if now < self._looked_s + _LOOK_S:
            return
        self._looked_s = now
        for each in list(self._under_way):
            for name in sorted(each.lacking):
                if now >= each.end:
                    log.warning("%s has not applied a download by its deadline", name)
                    self._drop(name)
                elif each in self._under_way:
                    self._tell(name, Ping(self._incarnation))
        if self._under_way:
            self._idle_s = now
        elif (
            self._server is not None
            and self._offered is not None
            and self._offered[0].policy_version < newest
            and now >= self._idle_s + PATIENCE * self._config.publish_deadline_s
        ):
            self._server.withdraw()
            self._offered = None

    def close(self) -> None:
        """Serve nothing any more."""
        if self._server is not None:
            self._server.close()

    def _offer(
        self, parcel: Parcel, manifest: Callable[[Parcel], WeightManifest]
    ) -> tuple[WeightManifest, str]:
        """What is served: this version, unless another one is still under way."""
        offered = self._offered
        if offered and (self._under_way or offered[0].policy_version == parcel.version):
            return offered
        if self._server is None:
            from weight_sync.transports.snapshot_server import SnapshotServer

            config, host = self._config, self._host
            stall_s, rate = config.publish_deadline_s, config.download_bytes_per_s
            self._server = SnapshotServer(host.address, host.folder, stall_s, rate)
        self._offered = None
        made = manifest(parcel), self._server.offer(parcel.buckets)
        self._offered = made
        return made

    def _begin(self, name: str, node: str, manifest: WeightManifest, path: str) -> None:
        assert self._server is not None
        nbytes = sum(manifest.bucket_bytes)
        where = Rendezvous(
            incarnation=self._incarnation,
            epoch=next(self._epochs),
            transport="http",
            store_host=self._host.address,
            store_port=self._server.port,
            prefix=path,
            rank=1,
            world_size=2,
            timeout_s=self._config.publish_deadline_s,
            hand_on="" if node in self._apart else secrets.token_hex(8),
            nbytes=nbytes,
            transfer_s=self._config.download_s(nbytes),
            key=self._server.key,
        )
        # Beside the bytes: what the actor's own phases may take.
        rest_s = 4 * self._config.deadline_s(2 * nbytes, first=True)
        end = time.monotonic() + where.transfer_s + rest_s
        self._under_way.append(_Download(name, node, where, manifest, end, {name}))
        log.info("%s downloads version %d from %s", name, manifest.policy_version, path)
        self._tell(name, where)

    def _tell_reader(self, found: _Download, name: str) -> None:
        log.info("%s reads what %s downloads", name, found.relay)
        where = found.where
        told = msgspec.structs.replace(where, transport="node", prefix=where.hand_on, hand_on="")
        self._tell(name, told)

    def _of(self, answer: Answer) -> _Download | None:
        for each in self._under_way:
            if each.where.epoch == answer.epoch and answer.actor_id in each.lacking:
                return each
        return None

    def _tell(self, name: str, message: FromLearner) -> None:
        if name not in self._channel.joined or not self._channel.send(name, message):
            log.warning("%s left before it had its download", name)
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._channel.drop(name)
        self.forget(name)

    def _lost(self, found: _Download, name: str) -> None:
        """One that has not applied it goes: a relay's readers begin anew, with another."""
        found.lacking.discard(name)
        if name == found.relay:
            self._end(found)
        else:
            self._end_if_done(found)

    def _end_if_done(self, found: _Download) -> None:
        if found.lacking or found not in self._under_way:
            return
        self._end(found)
        if found.where.hand_on and found.relay in self._channel.joined:
            self._channel.send(found.relay, Release())

    def _end(self, found: _Download) -> None:
        if found in self._under_way:
            self._under_way.remove(found)
            self._idle_s = time.monotonic()

    def _failed(self, found: _Download, name: str, text: str) -> None:
        error = as_error(f"{text} ({name}, version {found.manifest.policy_version})")
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        log.warning("%s failed to download: %s", name, error)
        self._lost(found, name)
        if isinstance(error, RelayFailed):
            self._apart.add(found.node)
            log.warning("each actor of node %s receives for itself now", found.node)
        unsound = isinstance(error, VerificationFailed)
        passing = unsound or isinstance(error, TransportFailed | SyncTimeout)
        if not passing or failures > (REFITS if unsound else _ATTEMPTS):
            self._failures.pop(name)
            self._refuse(name, str(error))
            self._channel.drop(name)
        elif not unsound:
            self._channel.drop(name)  # it joins again

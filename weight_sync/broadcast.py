"""The learner's side of the protocol: every actor that lacks a version gets it, verified.

Each stage waits for all actors of the group, with a deadline that names those who are silent. An
actor that dies or comes back ends the stage: it is dropped and may join again, and the others get
the version anew. Sockets and threads are unknown here.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from configs.schema import WeightSyncConfig
from weight_sync import buckets
from weight_sync.control import Channel, LearnerHost
from weight_sync.downloads import Downloads
from weight_sync.protocol import (
    Adapter,
    Answer,
    Applied,
    Connecting,
    EngineDiffers,
    FromLearner,
    Join,
    ManifestMismatch,
    Ping,
    Receiving,
    Refused,
    RelayFailed,
    Release,
    Rendezvous,
    Sent,
    SyncTimeout,
    TransportFailed,
    TransportUnusable,
    VerificationFailed,
    WeightManifest,
    WeightSyncError,
    as_error,
    describe,
)
from weight_sync.routes import Lacking, Routes, lacking, routes
from weight_sync.staging import Parcel
from weight_sync.transports.base import Forming, Transport, host
from weight_sync.transports.selection import choose, shown
from weight_sync.verification import Verification

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # how often those who are waited for are looked after
_GLANCE_S = 0.02  # and how often the learner listens while a group forms
_ATTEMPTS = 5  # in a row without a completed version

AnswerType = TypeVar("AnswerType", bound=Answer)


class _LostError(WeightSyncError):
    """An actor of the group under way has gone, come back anew or failed, or did not verify."""


class Broadcast:
    """Rank 0 of the collective and its protocol; `say` is told what is being waited for."""

    def __init__(
        self,
        config: WeightSyncConfig,
        incarnation: int,
        learner_host: LearnerHost,
        channel: Channel,
        say: Callable[[str], None],
        adapter: Adapter | None = None,
        noted: Callable[[Applied], None] | None = None,
    ) -> None:
        """`adapter`: what the tensors of all versions are of; None: the whole model. `noted` is
        told of each version that an actor has taken up.
        """
        self._adapter, self._noted = adapter, noted
        self._config, self._incarnation, self._learner_host = config, incarnation, learner_host
        self._channel, self._say = channel, say
        self._has: dict[str, int] = {}  # the version of this incarnation that serves there
        self._served: set[str] = set()  # who has applied weights, verified, of any incarnation
        self._devices: dict[str, tuple[str, ...]] = {}  # of the actors' workers, by rank
        self._nodes: dict[str, str] = {}  # of the actors
        self._apart: set[str] = set()  # nodes on which handing on has failed
        self._verification = Verification()
        self._transport: Transport | None = None
        self._group: tuple[str, ...] = ()  # the actors that it serves
        self._routes = Routes({}, {}, 0)  # to them
        self._replaced: set[str] = set()  # who joined since the group was formed
        self._epoch = 0
        self._failures = self._refused = 0
        self._sent = (-1, 0)  # a version, and its bytes that went over the network
        self._settled: set[str] = set()  # who holds weights, and has been in no group since
        judge = self._verification.late
        self.downloads = Downloads(
            config, incarnation, learner_host, channel, self._apart, self._refuse, judge
        )

    def hear(self, deadline: float | None) -> Answer | None:
        """Take one message; return it when it is an answer. Raises what an actor reports."""
        message = self._channel.receive(deadline)
        if isinstance(message, Join):
            self._joined(message)
            return None
        if message is not None and self.downloads.takes(message):
            if self.downloads.hear(message) and isinstance(message, Applied):
                self._note_applied(message)
                self._settled.add(message.actor_id)
            return None
        if isinstance(message, Connecting | Applied) and message.error:
            self._failed(message)
            return None
        if isinstance(message, Applied) and message.incarnation == self._incarnation:
            self._note_applied(message)
        return message

    def lacking(self, version: int) -> Lacking:
        """The actors that do not serve this version yet, but for those that download."""
        busy = self.downloads.names
        has = {name: self._has[name] for name in self._channel.joined if name not in busy}
        far = {n for n in has if self._nodes[n] != self._learner_host.node}
        if not self.downloads.usable:
            far = set()
        doubted = {name for name in far if self._verification.doubts(name)}
        return lacking(has, version, far - doubted, self._settled & far)

    def serves(self, version: int) -> bool:
        """True where some actor serves this version."""
        return any(self._has[name] >= version for name in self._channel.joined)

    def download(self, parcel: Parcel, names: tuple[str, ...]) -> None:
        """Have these actors download a version, and wait for none."""
        self.downloads.begin(names, self._nodes, parcel, self._manifest)

    def deliver(self, parcel: Parcel) -> dict[str, float] | None:
        """Announce, send and have a version applied by all who are behind; returns its gauges.

        None when one of them was lost on the way: see who is behind now. Raises ManifestMismatch or
        VerificationFailed as an actor reports them, and TransportFailed when this fails again and
        again; each names the actors.
        """
        names = self.lacking(parcel.version).together
        try:
            gauges = self._send(parcel, self._joined_by(names, parcel.nbytes), names)
        except (_LostError, TransportFailed) as error:
            self.close()
            self._failures += 1
            gone = [name for name in names if not self._look_after(name)]
            log.warning("version %d is sent again: %s", parcel.version, error)
            if self._failures >= _ATTEMPTS and not gone:
                raise TransportFailed(
                    f"version {parcel.version} did not reach {', '.join(names)} in "
                    f"{self._failures} attempts: {error}"
                ) from error
            return None
        self._failures = 0
        return gauges

    def _joined(self, join: Join) -> None:
        name, own = join.actor_id, join.incarnation == self._incarnation
        sound = own and not self._verification.doubts(name)
        self._has[name] = join.policy_version if sound else -1
        self._devices[name], self._nodes[name] = join.devices, join.node
        self._replaced.add(name)
        self._note_served(name, join.policy_version >= 0)
        self.downloads.forget(name)
        (self._settled.add if self._has[name] >= 0 else self._settled.discard)(name)
        log.info("%s joined", name)

    def _note_applied(self, applied: Applied) -> None:
        self._has[applied.actor_id] = applied.policy_version
        if self._noted is not None:
            self._noted(applied)
        self._note_served(applied.actor_id, True)
        self._settled.discard(applied.actor_id)

    def close(self) -> None:
        """Leave the group."""
        transport, self._transport, self._group = self._transport, None, ()
        if transport is not None:
            transport.close()

    def _joined_by(self, names: tuple[str, ...], nbytes: int) -> Transport:
        """The collective of these actors; formed unless it is the last one."""
        if self._transport and self._group == names and self._replaced.isdisjoint(names):
            return self._transport
        self.close()
        self._epoch += 1
        shared = self._config.transport == "snapshot"  # all nodes see one folder
        nodes = {} if shared else self._nodes
        here = self._learner_host
        found = self._routes = routes(
            {name: self._devices[name] for name in names},
            {name: nodes.get(name, here.node) for name in names},
            here.node,
            self._apart,
        )
        kind = self._choose(found.members)
        transport = host(
            kind,
            address=here.folder if kind == "snapshot" else here.address,
            world_size=1 + sum(map(len, found.members.values())),
            incarnation=self._incarnation,
            epoch=self._epoch,
            timeout_s=self._config.publish_deadline_s,
        )
        self._transport, self._group, self._replaced = transport, names, set()
        self._call_together(msgspec.structs.replace(transport.rendezvous, nbytes=nbytes))
        self._form(transport, names)
        log.info(
            "weights go from %s by %s to %s%s (group %d)",
            here.device,
            kind,
            shown(found.members),
            found.said(),
            self._epoch,
        )
        return transport

    def _call_together(self, where: Rendezvous) -> None:
        """Tell the members where the group forms, and then who reads from relays, which have made
        their folders meanwhile."""
        deadline_s, found = self._config.publish_deadline_s, self._routes
        folders = {relay: secrets.token_hex(8) for relay in found.relays}
        rank = 1
        for name, workers in found.members.items():
            folder = folders.get(name, "")
            self._tell(name, msgspec.structs.replace(where, rank=rank, hand_on=folder))
            rank += len(workers)
        self._gather(Connecting, tuple(found.members), "", deadline_s)
        readers = {name: folders[relay] for relay, names in found.relays.items() for name in names}
        for name, folder in readers.items():
            self._tell(name, msgspec.structs.replace(where, transport="node", prefix=folder))
        self._gather(Connecting, tuple(readers), "", deadline_s)

    def _choose(self, devices: dict[str, tuple[str, ...]]) -> str:
        """The transport to these actors. One whose device it cannot reach is refused where others
        serve already; else raises TransportUnusable."""
        try:
            return choose(self._config.transport, self._learner_host.device, devices)
        except TransportUnusable as error:
            strangers = [name for name in devices if self._has[name] < 0]
            if max(self._has.values()) < 0:
                raise
            for name in strangers:
                self._refuse(name, describe(error))
                self._channel.drop(name)
            raise _LostError(f"{', '.join(strangers)}: {error}") from error

    def _form(self, transport: Transport, names: tuple[str, ...]) -> None:
        """Form the group, and listen meanwhile. Raises TransportFailed, _LostError."""
        self._say(f"{', '.join(names)} to form the group of weights")
        forming = Forming(self._epoch, transport.form)
        forming.start()
        look_s = time.monotonic() + _LOOK_S
        limit_s = time.monotonic() + self._config.publish_deadline_s
        while not forming.done(_GLANCE_S):
            self.hear(time.monotonic())
            if time.monotonic() >= look_s:
                look_s += _LOOK_S
                if lost := [name for name in names if not self._look_after(name)]:
                    raise _LostError(f"{', '.join(lost)} left while the group of weights formed")
            if time.monotonic() >= limit_s:
                break
        forming.finish(0.0)

    def _send(
        self, parcel: Parcel, transport: Transport, names: tuple[str, ...]
    ) -> dict[str, float]:
        version, size = parcel.version, parcel.nbytes
        # The first version of all may be an engine's first request, as slow as its start.
        first = max(self._has.values()) < 0
        deadline_s = self._config.deadline_s(self._routes.hops * size, first)
        of = f" of version {version} ({size / 1e9:.2g} GB)"
        manifest = self._manifest(parcel)
        for name in names:
            self._tell(name, manifest)
        self._gather(Receiving, names, of, deadline_s)
        self._say(f"the broadcast{of} to {', '.join(names)}")
        begun = time.perf_counter()
        transport.broadcast(parcel.buckets, deadline_s)
        gauges = {"sync/broadcast_s": time.perf_counter() - begun}
        before = self._sent[1] if self._sent[0] == version else 0
        self._sent = version, before + self._routes.remote * size
        sent = Sent(self._incarnation, version)
        for name in names:
            self._tell(name, sent)
        applied = self._gather(Applied, names, of, deadline_s)
        self._verification.compare(applied, version)
        self._again(names)
        for relay in self._routes.relays:
            self._tell(relay, Release())
        gauges["sync/sent_bytes"] = float(self._sent[1])
        gauges["sync/refits"] = float(self._verification.refits)
        gauges["sync/refused"] = float(self._refused)
        for each in ("generation_pause_s", "receive_s", "apply_s", "probe_error", "probe_mean"):
            gauges[f"sync/{each}"] = max(getattr(answer, each) for answer in applied)
        return gauges

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
            parcel.start_logprobs,
            self._adapter,
        )

    def _tell(self, name: str, message: FromLearner) -> None:
        if name not in self._channel.joined or not self._channel.send(name, message):
            self._channel.drop(name)
            raise _LostError(f"{name} left before {type(message).__name__} could be sent")

    def _gather(
        self, kind: type[AnswerType], names: tuple[str, ...], of: str, deadline_s: float
    ) -> list[AnswerType]:
        """One answer of this kind and epoch from each. Raises _LostError naming who is lost."""
        answers: dict[str, AnswerType] = {}
        deadline = time.monotonic() + deadline_s
        while missing := [name for name in names if name not in answers]:
            what = f"{kind.__name__}{of} from {', '.join(missing)}"
            self._say(what)
            answer = self.hear(min(deadline, time.monotonic() + _LOOK_S))
            if isinstance(answer, kind) and answer.epoch == self._epoch:
                answers[answer.actor_id] = answer
                continue
            self._again(missing)
            if lost := [name for name in missing if not self._look_after(name)]:
                raise _LostError(f"{', '.join(lost)} left while the learner waited for {what}")
            if time.monotonic() >= deadline:
                for name in missing:
                    self._channel.drop(name)
                raise _LostError(f"the learner waited {deadline_s:g} s for {what}")
        return list(answers.values())

    def _look_after(self, name: str) -> bool:
        """Return True if this member of the group is still the one that it was formed with."""
        ping = Ping(self._incarnation)
        if name in self._channel.joined and not self._channel.send(name, ping):
            self._channel.drop(name)
        return name in self._channel.joined and name not in self._replaced

    def _failed(self, answer: Connecting | Applied) -> None:
        """Raise what an actor reports if it says something about weights; else drop the actor."""
        name = answer.actor_id
        if isinstance(answer, Connecting):
            text = f"{answer.error} ({name})"
        else:
            text = f"{answer.error} ({name}, version {answer.policy_version})"
        error = as_error(text)
        if isinstance(error, VerificationFailed):
            if answer.epoch == self._epoch:  # else it gets the version anew anyway
                self._verification.failed(name, error)
            return
        stranger = isinstance(error, ManifestMismatch | EngineDiffers) and self._others_serve(name)
        if not stranger and not isinstance(error, TransportFailed | SyncTimeout):
            raise error
        if stranger and name in self._channel.joined:
            self._refuse(name, text)
        if answer.epoch == self._epoch and name in self._group:
            if isinstance(error, RelayFailed):
                self._apart.add(self._nodes[name])
                log.warning("each actor of node %s receives for itself now", self._nodes[name])
            self._channel.drop(name)
            log.warning("%s failed: %s", name, text)

    def _others_serve(self, name: str) -> bool:
        """Return True if this actor has applied no version, and another has: then the model is
        sound, and it is the actor that must go.
        """
        return name not in self._served and bool(self._served)

    def _note_served(self, name: str, served: bool) -> None:
        (self._served.add if served else self._served.discard)(name)

    def _refuse(self, name: str, cause: str) -> None:
        self._refused += 1
        log.warning("%s is refused: %s", name, cause)
        self._channel.send(name, Refused(cause))

    def _again(self, names: Iterable[str]) -> None:
        """Raise _LostError when some of them did not verify: they get the version anew."""
        if unfit := self._verification.unfit(names):
            self._has.update(dict.fromkeys(unfit, -1))
            raise _LostError("; ".join(unfit.values()))

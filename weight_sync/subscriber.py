"""The actor's side of weight sync: applies what the learner sends and verifies that it serves.

Consumes the learner's messages (a DEALER) and a `ServingEngine`; produces `Join`, the answers to
what the learner says, and `serving`, an event that is set exactly while verified weights serve.
Waits for the learner: for a first word, and for bytes once they have been sent, with
deadlines; for the next version without one (a learner that evaluates is silent for minutes; its
death is the launcher's to notice). While nothing comes it says Join again every second: a learner
that started anew, or has dropped this actor, takes it in. Runs on the actor's event loop and never
blocks it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from configs.keys import Keys
from configs.schema import WeightSyncConfig
from weight_sync.channel import HEARTBEAT_MS, SILENT_MS
from weight_sync.protocol import (
    Applied,
    Connecting,
    FromActor,
    FromLearner,
    Join,
    Receiving,
    Refused,
    Rendezvous,
    Sent,
    SyncTimeout,
    TransportFailed,
    VerificationFailed,
    WeightManifest,
    WeightSyncError,
    WorkerReport,
    as_error,
    decode_from_learner,
    decode_report,
    describe,
    encode,
)

log = logging.getLogger(__name__)

JOIN_AGAIN_S = 1.0


class ServingEngine(Protocol):
    """What the subscriber needs of the engine that generates."""

    async def pause(self) -> None:
        """Stop scheduling; requests in flight are kept, their caches if it is to keep them."""

    async def resume(self) -> None:
        """Go on with the requests in flight."""

    async def call_workers(self, method: str, *args: bytes | int | str | float) -> list[bytes]:
        """Call `WeightSyncWorker.method` on every worker; one encoded WorkerReport each."""

    async def set_policy_version(self, version: int) -> None:
        """Label tokens sampled from now on; called while paused."""

    async def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs float32[n - 1] of tokens[1:] under the weights that serve."""


class Subscriber:
    """Follows the learner's versions; `run` is a task that lives as long as the actor.

    `verified` is the (incarnation, version) that serves, None before the first. `on_verified` is
    called with them after each version that passed its probe, `on_loaded` with a version before
    anything is sampled from it: until it is verified, a token of that number is of nobody.
    """

    def __init__(
        self,
        actor_id: str,
        endpoint: str,
        engine: ServingEngine,
        config: WeightSyncConfig,
        on_verified: Callable[[int, int], None] | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.verified: tuple[int, int] | None = None
        self.serving = asyncio.Event()
        self.on_verified = on_verified
        self.on_loaded: Callable[[int], None] | None = None
        self._actor_id = actor_id
        self._endpoint, self._keys = endpoint, keys
        self._engine = engine
        self._config = config
        self._epoch = -1  # of the group joined last
        self._manifest: WeightManifest | None = None  # announced, not yet sent
        self._intact = False  # the engine holds the weights of `verified`, whole
        self._gauges: dict[str, float] = {"sync/updates": 0.0}

    async def run(self) -> None:
        """Join and follow until cancelled.

        Raises SyncTimeout when, before the first version, the learner says nothing for
        `join_deadline_s`, WeightSyncError when it refuses this actor. A version that fails is
        reported to the learner; `serving` then stays cleared, unless only the transport failed.
        """
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 500)
            dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
            dealer.setsockopt(zmq.HANDSHAKE_IVL, SILENT_MS)
            if self._keys is not None:
                self._keys.present(dealer)
            dealer.connect(self._endpoint)
            learner = f"{self._actor_id}: the learner at {self._endpoint}"
            link = _Link(dealer, self._endpoint, learner)
            heard_s, limit_s = time.monotonic(), self._config.join_deadline_s
            await self._join(link)
            while True:
                message = await link.next(min(JOIN_AGAIN_S, limit_s))
                if message is not None:
                    await self._follow(link, message)
                    heard_s = time.monotonic()
                elif self.verified or time.monotonic() - heard_s < limit_s:
                    await self._join(link)
                else:
                    raise SyncTimeout(f"{link.peer} said nothing for {limit_s:g} s")

    def gauges(self) -> dict[str, float]:
        """Seconds and errors of the last version applied here, and how many there were."""
        return dict(self._gauges)

    @property
    def _deadline_s(self) -> float:
        """The first version may be the engine's first request: it gets as long as joining."""
        config = self._config
        return config.publish_deadline_s if self.verified else config.join_deadline_s

    async def _join(self, link: "_Link") -> None:
        incarnation, version = self.verified or (-1, -1)
        await link.send(Join(self._actor_id, incarnation, version))

    async def _follow(self, link: "_Link", message: FromLearner) -> None:
        if isinstance(message, Refused):
            raise WeightSyncError(f"{link.peer} refused: {message.cause}")
        if isinstance(message, Rendezvous):
            self._epoch, self._manifest = message.epoch, None
            report = await self._call("weight_sync_connect", encode(message))
            await link.send(Connecting(self._actor_id, message.epoch, report.error))
        elif isinstance(message, WeightManifest):
            await self._expect(link, message)
        elif isinstance(message, Sent) and self._manifest is not None:
            manifest, self._manifest = self._manifest, None
            await link.send(await self._apply(manifest))

    async def _expect(self, link: "_Link", manifest: WeightManifest) -> None:
        """Have the bytes of what is announced received while generation goes on."""
        refusal = self._refusal(manifest)
        if not refusal:
            report = await self._call("weight_sync_receive", encode(manifest), self._deadline_s)
            refusal = report.error
        if refusal:
            log.error("version %d refused: %s", manifest.policy_version, refusal)
            await link.send(self._applied(manifest, WorkerReport(error=refusal)))
            return
        self._manifest = manifest
        await link.send(Receiving(self._actor_id, self._epoch, manifest.policy_version))

    def _refusal(self, manifest: WeightManifest) -> str:
        version = (manifest.incarnation, manifest.policy_version)
        if self.verified is not None and version < self.verified:
            error = VerificationFailed(
                f"(incarnation, version) {version!r} after {self.verified!r}"
            )
            return describe(error)
        return ""

    async def _apply(self, manifest: WeightManifest) -> Applied:
        """Pause, apply, resume, verify; unless all of it worked, `serving` stays cleared (but for a
        version whose bytes never came).
        """
        self.serving.clear()
        deadline_s = self._deadline_s
        begun = time.perf_counter()
        await self._engine.pause()
        report = await self._call("weight_sync_apply", deadline_s)
        if report.error:
            log.error("version %d not applied: %s", manifest.policy_version, report.error)
            lost = isinstance(as_error(report.error), TransportFailed | SyncTimeout)
            self._intact = self._intact and lost
            if self._intact:
                await self._engine.resume()  # nothing was written: what served before serves on
                self.serving.set()
            return self._applied(manifest, report)
        self._intact = False
        if self.on_loaded is not None:
            self.on_loaded(manifest.policy_version)
        await self._engine.set_policy_version(manifest.policy_version)
        probe = asyncio.create_task(self._probe(manifest, deadline_s))
        await asyncio.sleep(
            0
        )  # lets the probe reach the engine's queue before anything is scheduled
        await self._engine.resume()
        pause_s = time.perf_counter() - begun
        probe_error = await probe
        if probe_error == float("inf"):
            error = SyncTimeout(f"the probe got no answer within {deadline_s:g} s")
            report = msgspec.structs.replace(report, error=describe(error))
        elif not probe_error <= manifest.probe_tolerance:  # also when it is NaN
            error = VerificationFailed("the probe's log-probs are not the learner's")
            report = msgspec.structs.replace(report, error=describe(error))
            log.error("version %d: %s (%g)", manifest.policy_version, report.error, probe_error)
        applied = self._applied(manifest, report, probe_error, pause_s)
        if not applied.error:
            self._serve(manifest, applied)
        return applied

    def _serve(self, manifest: WeightManifest, applied: Applied) -> None:
        self.verified, self._intact = (manifest.incarnation, manifest.policy_version), True
        self.serving.set()
        self._gauges = {
            f"sync/{name}": getattr(applied, name)
            for name in ("generation_pause_s", "receive_s", "apply_s", "probe_error")
        } | {
            "sync/updates": self._gauges["sync/updates"] + 1.0,
            "sync/policy_version": float(manifest.policy_version),
        }
        if self.on_verified is not None:
            self.on_verified(*self.verified)

    async def _probe(self, manifest: WeightManifest, deadline_s: float) -> float:
        """Largest absolute log-prob difference; infinite when the engine is silent too long."""
        try:
            async with asyncio.timeout(deadline_s):
                scores = await self._engine.score(manifest.probe_tokens)
        except TimeoutError:
            log.error("%s: the probe got no answer within %g s", self._actor_id, deadline_s)
            return float("inf")
        expected = np.asarray(manifest.probe_logprobs, dtype=np.float32)
        return float(np.max(np.abs(scores - expected), initial=0.0))

    def _applied(
        self,
        manifest: WeightManifest,
        report: WorkerReport,
        probe_error: float = float("nan"),
        pause_s: float = 0.0,
    ) -> Applied:
        return Applied(
            self._actor_id,
            self._epoch,
            manifest.incarnation,
            manifest.policy_version,
            report.bytes_digest,
            report.weights_checksum,
            probe_error,
            pause_s,
            report.receive_s,
            report.apply_s,
            report.error,
        )

    async def _call(self, method: str, *args: bytes | int | str | float) -> WorkerReport:
        """Call every worker; their reports as one: the first error, the longest times."""
        reports = [decode_report(each) for each in await self._engine.call_workers(method, *args)]
        failed = [report for report in reports if report.error]
        slowest = max(reports, key=lambda report: report.apply_s)
        return failed[0] if failed else slowest


class _Link:
    """The DEALER; `peer` is how the learner is named in errors."""

    def __init__(self, dealer: zmq.asyncio.Socket, endpoint: str, peer: str) -> None:
        self.peer = peer
        self._dealer, self._endpoint = dealer, endpoint

    async def send(self, message: FromActor) -> None:
        """Send one message; lost when the learner has been gone for long, or the connection has
        ended for good (its bytes were changed on the way): it hears Join again, on a new one.
        """
        try:
            await self._dealer.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            with contextlib.suppress(zmq.ZMQError):
                self._dealer.disconnect(self._endpoint)
            self._dealer.connect(self._endpoint)

    async def next(self, limit_s: float) -> FromLearner | None:
        """The next message, None when there is none within `limit_s`."""
        if not await self._dealer.poll(int(limit_s * 1000)):
            return None
        message: FromLearner = decode_from_learner(await self._dealer.recv())
        return message

"""The actor's side of weight sync: applies what the learner sends and verifies that it serves.

Consumes the learner's messages (a DEALER) and a `ServingEngine`; produces `Join`, the answers to
what the learner says, and `serving`, an event that is set exactly while verified weights serve.
Waits for the learner: for a first word, and for bytes once they have been sent, with
deadlines; for the next version without one (a learner that evaluates is silent for minutes; its
death is the launcher's to notice). While nothing comes it says Join again every second: a learner
that started anew, or has dropped this actor, takes it in. While it downloads it asks who is there
instead: another learner ends the download. Runs on the actor's event loop and never blocks it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.keys import Keys
from configs.runtime.node import own_node
from configs.schema import WeightSyncConfig
from weight_sync import probe
from weight_sync.control import Link
from weight_sync.protocol import (
    Applied,
    Connecting,
    EngineDiffers,
    Enquiry,
    FromLearner,
    Join,
    PeerFailed,
    Ping,
    Receiving,
    Refused,
    Release,
    Rendezvous,
    Sent,
    SyncTimeout,
    VerificationFailed,
    WeightManifest,
    WeightSyncError,
    WorkerReport,
    combined,
    decode_report,
    describe,
    encode,
    require_done,
)

log = logging.getLogger(__name__)

JOIN_AGAIN_S = 1.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.05  # between questions whether something is done


class ServingEngine(Protocol):
    """The engine that generates, as the subscriber needs it."""

    async def pause(self) -> None:
        """Stop scheduling; requests in flight are kept, their caches if it is to keep them."""

    async def resume(self) -> None:
        """Go on with the requests in flight."""

    async def call_workers(self, method: str, *args: bytes | int | str | float) -> list[bytes]:
        """Call `WeightSyncWorker.method` on every worker; one encoded WorkerReport each."""

    async def set_policy_version(self, version: int) -> None:
        """Label tokens sampled from now on; called while paused."""

    async def score(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], int]:
        """Log-probs float32[n - 1] of tokens[1:] under the weights that serve, and the version that
        the engine labels them with."""


class Subscriber:
    """Follows the learner's versions; `run` is a task that lives as long as the actor.

    `verified` is the (incarnation, version) that serves, None before the first. `on_verified` is
    called with them after each version that passed its probe, `on_loaded` with a version, and
    whether an earlier load of it is in doubt, before anything is sampled from it: until it is
    verified, a token of that number is of nobody.
    """

    def __init__(
        self,
        actor_id: str,
        endpoint: str,
        engine: ServingEngine,
        config: WeightSyncConfig,
        on_verified: Callable[[int, int], None] | None = None,
        keys: Keys | None = None,
        node: str = "",
    ) -> None:
        self.verified: tuple[int, int] | None = None
        self.serving = asyncio.Event()
        self.on_verified = on_verified
        self.on_loaded: Callable[[int, bool], None] | None = None
        self._actor_id, self._node = actor_id, node or own_node()
        self._endpoint, self._keys = endpoint, keys
        self._engine = engine
        self._config = config
        self._devices: tuple[str, ...] = ()  # where the model lies, worker by worker
        self._epoch = -1  # of the group joined last
        self._hops = 1  # of its bytes on their way here
        self._transfer_s = 0.0  # that they may take beside the deadlines, in a download
        self._loaded: tuple[int, int] | None = None  # what the engine holds, verified or not
        self._manifest: WeightManifest | None = None  # announced, not yet sent
        self._unread: FromLearner | None = None  # what ended a download
        self._enquired_s = 0.0
        self._start: probe.Distance | None = None  # of the weights that the engine loaded itself
        self._gauges: dict[str, float] = {"sync/updates": 0.0}

    async def run(self) -> None:
        """Join and follow until cancelled.

        Raises SyncTimeout when, before the first version, the learner says nothing for
        `join_deadline_s`, WeightSyncError when it refuses this actor. A version that fails is
        reported to the learner; `serving` then stays cleared, unless only the transport failed.
        """
        learner = f"{self._actor_id}: the learner at {self._endpoint}"
        with Link(self._endpoint, self._keys, learner) as link:
            self._devices = await self._where()
            heard_s, limit_s = time.monotonic(), self._config.join_deadline_s
            await self._join(link)
            while True:
                message, self._unread = self._unread, None
                message = message or await link.next(min(JOIN_AGAIN_S, limit_s))
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

    def _deadline_s(self, manifest: WeightManifest) -> float:
        size = self._hops * sum(manifest.bucket_bytes)
        return self._transfer_s + self._config.deadline_s(size, first=not self.verified)

    async def _join(self, link: Link) -> None:
        serves = self.serving.is_set() and self.verified
        incarnation, version = serves or (-1, -1)
        join = Join(self._actor_id, incarnation, version, self._devices, self._node)
        await link.send(join)

    async def _where(self) -> tuple[str, ...]:
        return require_done(await self._engine.call_workers("weight_sync_device")).devices

    async def _follow(self, link: Link, message: FromLearner) -> None:
        if isinstance(message, Refused):
            raise WeightSyncError(f"{link.peer} refused: {message.cause}")
        if isinstance(message, Rendezvous):
            self._epoch, self._manifest = message.epoch, None
            self._hops = 2 if message.hand_on or message.transport == "node" else 1
            self._transfer_s = message.transfer_s
            report = await self._call("weight_sync_connect", encode(message))
            await link.send(Connecting(self._actor_id, message.epoch, report.error))
        elif isinstance(message, WeightManifest):
            await self._expect(link, message)
        elif isinstance(message, Sent) and self._manifest is not None:
            manifest, self._manifest = self._manifest, None
            await link.send(await self._apply(link, manifest))
        elif isinstance(message, Release):
            await self._call("weight_sync_release")

    async def _expect(self, link: Link, manifest: WeightManifest) -> None:
        """Have the bytes of what is announced received while generation goes on."""
        refusal = self._refusal(manifest)
        if not refusal:
            limit_s = self._deadline_s(manifest)
            report = await self._call("weight_sync_receive", encode(manifest), limit_s)
            refusal = report.error
        if refusal:
            log.error("version %d refused: %s", manifest.policy_version, refusal)
            await link.send(self._applied(manifest, WorkerReport(error=refusal)))
            return
        self._manifest = manifest
        if (manifest.incarnation, manifest.policy_version) == self.verified:
            self.serving.clear()  # sent again: what serves is in doubt
        await link.send(Receiving(self._actor_id, self._epoch, manifest.policy_version))

    def _refusal(self, manifest: WeightManifest) -> str:
        version = (manifest.incarnation, manifest.policy_version)
        if self.verified is not None and version < self.verified:
            said = f"(incarnation, version) {version!r} after {self.verified!r}"
            return describe(VerificationFailed(said))
        return ""

    async def _apply(self, link: Link, manifest: WeightManifest) -> Applied:
        """Wait for the bytes while generation goes on, then pause, write, resume and verify.

        Where nothing was written, what served before serves on; else `serving` stays cleared until
        the probe has passed and, of an adapter, what the engine holds is what has arrived.
        """
        deadline_s = self._deadline_s(manifest)
        over = partial(self._download_over, link, manifest.incarnation)
        report = await self._made("weight_sync_arrived", deadline_s, over)
        if report.error:
            log.error("version %d not applied: %s", manifest.policy_version, report.error)
            return self._applied(manifest, report)
        if problem := await self._calibrate(manifest, deadline_s):
            log.error("version %d not applied: %s", manifest.policy_version, problem)
            return self._applied(manifest, WorkerReport(error=problem))
        self.serving.clear()
        begun = time.perf_counter()
        await self._engine.pause()
        report = await self._call("weight_sync_apply")
        if report.error:  # perhaps half of it was written: the engine stays paused
            log.error("version %d not applied: %s", manifest.policy_version, report.error)
            return self._applied(manifest, report)
        self._note_load(manifest)
        await self._engine.set_policy_version(manifest.policy_version)
        probing = asyncio.create_task(self._probe(manifest, deadline_s))
        # Lets the probe reach the engine's queue before anything is scheduled.
        await asyncio.sleep(0)
        await self._engine.resume()
        pause_s = time.perf_counter() - begun
        distance, problem = await probing
        applied = self._applied(manifest, report, distance, pause_s, problem)
        if not problem:
            return await self._compare(manifest, applied, deadline_s)
        log.error("version %d: %s", manifest.policy_version, problem)
        return applied

    async def _compare(
        self, manifest: WeightManifest, applied: Applied, deadline_s: float
    ) -> Applied:
        """Add the checksum of what the engine holds, and have the version serve: an adapter only
        once that is what has arrived; whole weights, whose checksum judges nothing by itself, at
        once.
        """
        if manifest.adapter is None:
            self._serve(manifest, applied)
        made = await self._made("weight_sync_checksum", deadline_s)
        if made.error:
            log.error("version %d: %s", manifest.policy_version, made.error)
        elif manifest.adapter is not None:
            self._serve(manifest, applied)
        return msgspec.structs.replace(
            applied, weights_checksums=made.weights_checksums, error=made.error
        )

    def _note_load(self, manifest: WeightManifest) -> None:
        """A version that is loaded again had not verified; under another incarnation the same
        number is the same step's weights, trained again."""
        version, before = (manifest.incarnation, manifest.policy_version), self._loaded
        again = before is not None and before[1] == version[1]
        in_doubt = again and (before == version or before != self.verified)
        self._loaded = version
        if self.on_loaded is not None:
            self.on_loaded(manifest.policy_version, in_doubt)

    def _serve(self, manifest: WeightManifest, applied: Applied) -> None:
        self.verified = (manifest.incarnation, manifest.policy_version)
        self.serving.set()
        self._gauges = {
            f"sync/{name}": getattr(applied, name)
            for name in ("generation_pause_s", "receive_s", "apply_s", "probe_error", "probe_mean")
        } | {
            "sync/updates": self._gauges["sync/updates"] + 1.0,
            "sync/policy_version": float(manifest.policy_version),
        }
        if self.on_verified is not None:
            self.on_verified(*self.verified)

    async def _calibrate(self, manifest: WeightManifest, deadline_s: float) -> str:
        """Before the first load, measure the engine's own against the learner's `model.path`;
        return what is wrong, or ''.
        """
        if self._loaded is not None or not manifest.start_logprobs:
            return ""
        await self._engine.set_policy_version(manifest.policy_version)  # nothing is sampled yet
        try:
            async with asyncio.timeout(deadline_s):
                scores, _ = await self._engine.score(manifest.probe_tokens)
        except TimeoutError:
            return describe(SyncTimeout(f"the first probe got no answer within {deadline_s:g} s"))
        self._start = probe.distance(scores, manifest.start_logprobs)
        log.info("probe of model.path as loaded here: %s", self._start)
        if self._start.mean <= probe.START_LIMIT:
            return ""
        return describe(
            EngineDiffers(
                "engine and learner compute different log-probs from model.path, before any "
                f"weights were sent: {self._start} nats over {len(scores)} tokens (a mean of at "
                f"most {probe.START_LIMIT:g} is rounding): set model.dtype and actors.dtype to "
                "float32, or name a model that vLLM and transformers compute alike"
            )
        )

    async def _probe(
        self, manifest: WeightManifest, deadline_s: float
    ) -> tuple[probe.Distance, str]:
        """The distance from the learner (infinite: no answer in time), and what is wrong, or ''."""
        try:
            async with asyncio.timeout(deadline_s):
                scores, version = await self._engine.score(manifest.probe_tokens)
        except TimeoutError:
            late = SyncTimeout(f"the probe got no answer within {deadline_s:g} s")
            return probe.NEVER, describe(late)
        found = probe.distance(scores, manifest.probe_logprobs)
        allowed = probe.bound(
            manifest.probe_tolerance, self._start, manifest.start_logprobs, manifest.probe_logprobs
        )
        wrong = ""
        if not allowed.admits(found):
            wrong = f"the probe's log-probs are not the learner's: {found}; allowed {allowed}"
        elif version != manifest.policy_version:
            wrong = f"the engine calls it version {version}"
        return found, describe(VerificationFailed(wrong)) if wrong else ""

    def _applied(
        self,
        manifest: WeightManifest,
        report: WorkerReport,
        distance: probe.Distance = probe.UNKNOWN,
        pause_s: float = 0.0,
        problem: str = "",
    ) -> Applied:
        return Applied(
            self._actor_id,
            self._epoch,
            manifest.incarnation,
            manifest.policy_version,
            report.bytes_digest,
            report.weights_checksums,
            distance.largest,
            distance.mean,
            pause_s,
            report.receive_s,
            report.apply_s,
            report.error or problem,
        )

    async def _download_over(self, link: Link, incarnation: int) -> str:
        """Why a download will not be waited for any longer; ''. Without its learner it would go on
        for minutes, as where a link is broken; a group breaks at once.
        """
        if self._epoch >= -1:
            return ""
        if (now := time.monotonic()) >= self._enquired_s + JOIN_AGAIN_S:
            self._enquired_s = now
            await link.send(Enquiry())
        while (message := await link.next(0.0)) is not None:
            if not isinstance(message, Ping):
                self._unread = message
                return describe(PeerFailed(f"{link.peer} says {type(message).__name__}"))
            if message.incarnation > incarnation:
                return describe(PeerFailed(f"{link.peer} is incarnation {message.incarnation} now"))
        return ""

    async def _made(
        self, method: str, deadline_s: float, over: Callable[[], Awaitable[str]] | None = None
    ) -> WorkerReport:
        """Ask until what a thread of the worker makes is there, or until `over` says why that is
        not waited for; generation goes on meanwhile.
        """
        deadline, pause_s = time.monotonic() + deadline_s, FIRST_LOOK_S
        while (report := await self._call(method)).pending:
            if time.monotonic() >= deadline:
                late = SyncTimeout(f"{method} was not done within {deadline_s:g} s")
                return WorkerReport(error=describe(late))
            if over is not None and (why := await over()):
                return WorkerReport(error=why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return report

    async def _call(self, method: str, *args: bytes | int | str | float) -> WorkerReport:
        """Call every worker; their reports as one."""
        return combined(
            [decode_report(each) for each in await self._engine.call_workers(method, *args)]
        )

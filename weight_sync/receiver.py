"""The receiving end of the broadcast: one version at a time into reused buckets, then a model.

Consumes an encoded Rendezvous whenever the group is formed anew, then per version an encoded
manifest and its bytes; produces one encoded WorkerReport per call. `connect` waits for nothing,
`receive` for the thread that joins the group, `apply` for the thread that receives, both with
deadlines. Knows no engine: the model is two functions, so that vLLM's worker and a bare
module serve alike.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from weight_sync import buckets
from weight_sync.protocol import (
    ManifestMismatch,
    SyncTimeout,
    VerificationFailed,
    WeightManifest,
    WeightSyncError,
    WorkerReport,
    decode_manifest,
    decode_rendezvous,
    describe,
    encode,
)
from weight_sync.transport import Forming, GlooTransport


class Receiver:
    """Receives for one model.

    `layout()` gives the checkpoint tensors that the model is made of, `load(named_tensors)` writes
    them. Failures that belong to the protocol travel in `WorkerReport.error`; anything else is
    raised.
    """

    def __init__(
        self,
        layout: Callable[[], buckets.Layout],
        load: Callable[[buckets.NamedTensors], None],
    ) -> None:
        self._layout = layout
        self._load = load
        self._connection: Forming | None = None
        self._reception: _Reception | None = None

    def connect(self, rendezvous: bytes) -> bytes:
        """Begin to join the group of an encoded Rendezvous; what was under way is given up."""
        where = decode_rendezvous(rendezvous)
        self._connection = Forming(where.epoch, partial(GlooTransport.join, where))
        self._connection.start()
        return encode(WorkerReport())

    def receive(self, manifest: bytes, deadline_s: float) -> bytes:
        """Check an encoded WeightManifest against the model; receive its bytes on a thread."""
        try:
            self._start(decode_manifest(manifest), deadline_s)
        except WeightSyncError as error:
            return failure(error)
        return encode(WorkerReport())

    def apply(self, deadline_s: float) -> bytes:
        """Wait for the bytes, check their digest, write them into the (paused) model."""
        begun = time.perf_counter()
        try:
            reception = self._reception
            if reception is None:
                raise ManifestMismatch("no version has been announced")
            received = reception.finish(deadline_s)
            self._load(buckets.unpack(reception.manifest.tensors, reception.staging))
        except WeightSyncError as error:
            return failure(error)
        apply_s = time.perf_counter() - begun
        return encode(WorkerReport(received, receive_s=reception.seconds, apply_s=apply_s))

    def _start(self, manifest: WeightManifest, deadline_s: float) -> None:
        if self._connection is None:
            raise ManifestMismatch("the broadcast group has not been joined")
        offered = {spec.name: (spec.shape, spec.dtype) for spec in manifest.tensors}
        buckets.require_same(offered, self._layout(), ("learner", "actor"))
        transport, last = self._connection.finish(deadline_s), self._reception
        under_way = last is not None and last.is_alive()
        if last and under_way and last.transport is transport:
            raise SyncTimeout(f"version {last.manifest.policy_version} is still under way")
        if last and not under_way and last.manifest.bucket_bytes == manifest.bucket_bytes:
            staging = last.staging
        else:
            staging = buckets.allocate(manifest.bucket_bytes)
        self._reception = _Reception(transport, manifest, staging, deadline_s)
        self._reception.start()


class _Reception(threading.Thread):
    """One version under way; a thread, so that generation goes on meanwhile."""

    def __init__(
        self,
        transport: GlooTransport,
        manifest: WeightManifest,
        staging: list[torch.Tensor],
        deadline_s: float,
    ) -> None:
        super().__init__(name="weight-reception", daemon=True)
        self.manifest = manifest
        self.staging = staging
        self.seconds = 0.0
        self.transport = transport
        self._deadline_s = deadline_s
        self._digest = ""
        self._error: WeightSyncError | None = None

    def run(self) -> None:
        """Receive, then digest."""
        begun = time.perf_counter()
        try:
            self.transport.broadcast(self.staging, self._deadline_s)
            self._digest = buckets.digest(self.staging)
        except WeightSyncError as error:
            self._error = error
        self.seconds = time.perf_counter() - begun

    def finish(self, deadline_s: float) -> str:
        """The digest of what arrived; raises what went wrong on the way."""
        self.join(deadline_s)
        version = self.manifest.policy_version
        if self.is_alive():
            raise SyncTimeout(f"version {version} had not arrived {deadline_s:g} s after `Sent`")
        if self._error is not None:
            raise self._error
        if self._digest != self.manifest.bytes_digest:
            raise VerificationFailed(
                f"version {version}: announced digest {self.manifest.bytes_digest!r}, received "
                f"{self._digest!r}"
            )
        return self._digest


def failure(error: WeightSyncError) -> bytes:
    """An encoded WorkerReport of a failed call."""
    return encode(WorkerReport(error=describe(error)))

"""The receiving end of the broadcast: one version at a time into reused buckets, then a model.

Every call takes encoded messages and returns an encoded WorkerReport. `receive` waits, with a
deadline, for the thread that joins the group; every other call returns at once: bytes, their digest
and the model's checksum are made on threads and asked for until they are there. Knows no engine:
the model is a few functions, so that vLLM's worker and a bare module serve alike.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import msgspec
import torch

from weight_sync import buckets
from weight_sync.adapter import require_adapter
from weight_sync.protocol import (
    Adapter,
    ManifestMismatch,
    Rendezvous,
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
from weight_sync.transports.base import Forming, Transport, device_name, join
from weight_sync.transports.download import DownloadTransport
from weight_sync.transports.node_file import NodeFile, NodeTransport, remove_leftovers
from weight_sync.transports.selection import CPU


class Receiver:
    """Receives for one model.

    `layout()` gives the checkpoint tensors that the model, or its `adapter`, is made of;
    `load(named_tensors)` writes them; `checksum(named_tensors)` tells what the model then holds,
    and may raise VerificationFailed where that is not what has arrived. `worker` of `workers` is
    its place in an engine that shares a model out: each receives all of a version, and where they
    are several, in its host's memory, since a whole model may fit no GPU of theirs. Failures that
    belong to the protocol travel in `WorkerReport.error`; anything else is raised.
    """

    def __init__(
        self,
        layout: Callable[[], buckets.Layout],
        load: Callable[[buckets.NamedTensors], None],
        checksum: Callable[[buckets.NamedTensors], str],
        device: torch.device | str = CPU,
        worker: int = 0,
        workers: int = 1,
        adapter: Adapter | None = None,
    ) -> None:
        self._layout, self._load, self._device = layout, load, device
        self._adapter = adapter
        self._worker, self._workers = worker, workers
        self._checksum = checksum
        self._connection: Forming | None = None
        self._node_file: NodeFile | None = None  # of a relay's first worker
        self._reception: _Reception | None = None
        self._summing: Future[str] | None = None
        self._thread = ThreadPoolExecutor(1, "weight-checksum")

    def device(self) -> bytes:
        """The model's device, as in `Join.device`."""
        return encode(WorkerReport(devices=(device_name(self._device),)))

    def connect(self, rendezvous: bytes) -> bytes:
        """Begin to join the group of an encoded Rendezvous; what was under way is given up."""
        where = decode_rendezvous(rendezvous)
        if self._reception is not None:
            self._reception.give_up()
        if self._node_file is not None:
            self._node_file.close()
            self._node_file = None
        remove_leftovers()
        try:
            if where.hand_on and not self._worker:
                self._node_file = NodeFile(where)
        except WeightSyncError as error:
            return failure(error)
        self._connection = Forming(where.epoch, partial(self._join, where))
        self._connection.start()
        return encode(WorkerReport())

    def receive(self, manifest: bytes, deadline_s: float) -> bytes:
        """Check an encoded WeightManifest against the model; receive its bytes on a thread."""
        try:
            self._start(decode_manifest(manifest), deadline_s)
        except WeightSyncError as error:
            return failure(error)
        return encode(WorkerReport())

    def arrived(self) -> bytes:
        """Report the announced digest of the bytes, that they are pending, or what failed."""
        try:
            return encode(self._expected().look())
        except WeightSyncError as error:
            return failure(error)

    def apply(self) -> bytes:
        """Write what has arrived into the (paused) model."""
        begun = time.perf_counter()
        try:
            reception = self._expected()
            report = reception.look()
            if report.pending:
                raise SyncTimeout(f"version {reception.manifest.policy_version} has not arrived")
            self._load(reception.tensors())
        except WeightSyncError as error:
            return failure(error)
        if torch.device(self._device).type == "cuda":
            torch.cuda.synchronize(self._device)
        apply_s = time.perf_counter() - begun
        self._summing = self._thread.submit(self._checksum, reception.tensors())
        return encode(msgspec.structs.replace(report, apply_s=apply_s))

    def checksum(self) -> bytes:
        """The checksum of the model as it was loaded last; pending until it has been made, which
        generation need not wait for: it changes no weight.
        """
        if self._summing is None or not self._summing.done():
            return encode(WorkerReport(pending=True))
        try:
            return encode(WorkerReport(weights_checksums=(self._summing.result(),)))
        except WeightSyncError as error:
            return failure(error)

    def release(self) -> bytes:
        """Remove what was handed on to the other actors of this node: all have it."""
        if self._node_file is not None:
            self._node_file.clear()
        return encode(WorkerReport())

    def _join(self, where: Rendezvous) -> Transport:
        """On a thread, whose current GPU is the first one, wherever the model lies."""
        _use(self._device)
        if where.hand_on and self._worker:
            return NodeTransport.join(msgspec.structs.replace(where, prefix=where.hand_on))
        return join(msgspec.structs.replace(where, rank=where.rank + self._worker))

    def _expected(self) -> "_Reception":
        if self._reception is None:
            raise ManifestMismatch("no version has been announced")
        return self._reception

    def _start(self, manifest: WeightManifest, deadline_s: float) -> None:
        if self._connection is None:
            raise ManifestMismatch("the broadcast group has not been joined")
        require_adapter(manifest.adapter, self._adapter)
        offered = {spec.name: (spec.shape, spec.dtype) for spec in manifest.tensors}
        buckets.require_same(offered, self._layout(), ("learner", "actor"))
        transport, last = self._connection.finish(deadline_s), self._reception
        under_way = last is not None and last.is_alive()
        if last and under_way and last.transport is transport:
            raise SyncTimeout(f"version {last.manifest.policy_version} is still under way")
        on_host = transport.place() == CPU or self._workers > 1
        place = CPU if on_host else str(self._device)
        if last and not under_way and last.fits(manifest.bucket_bytes, place):
            staging = last.staging
        else:
            staging = buckets.allocate(manifest.bucket_bytes, place)
        self._summing = None  # what an older version came to says nothing of this one
        self._reception = _Reception(
            transport, manifest, staging, deadline_s, self._device, self._node_file
        )
        self._reception.start()


class _Reception(threading.Thread):
    """One version under way; a thread, so that generation goes on meanwhile."""

    def __init__(
        self,
        transport: Transport,
        manifest: WeightManifest,
        staging: list[torch.Tensor],
        deadline_s: float,
        device: torch.device | str,
        node_file: NodeFile | None,
    ) -> None:
        super().__init__(name="weight-reception", daemon=True)
        self.manifest = manifest
        self.staging = staging
        self.seconds = 0.0
        self.transport = transport
        self._deadline_s, self._device = deadline_s, device
        self._node_file = node_file
        self._digest = ""
        self._error: Exception | None = None

    def run(self) -> None:
        """Receive, then digest; a relay then hands on what is right."""
        begun = time.perf_counter()
        try:
            _use(self._device)
            self.transport.broadcast(self.staging, self._deadline_s)
            self._digest = buckets.digest(self.staging)
            if self._digest != self.manifest.bytes_digest:
                raise VerificationFailed(
                    f"version {self.manifest.policy_version}: announced digest "
                    f"{self.manifest.bytes_digest!r}, received {self._digest!r}"
                )
            if self._node_file is not None:
                self._node_file.write(self.staging)
        except Exception as error:  # noqa: BLE001 - raised again by `look`
            self._error = error
            # Of bytes that did not verify the learner must hear from this actor before it hears of
            # readers that gave up: they wait for the next group, whose forming closes this.
            if self._node_file is not None and not isinstance(error, VerificationFailed):
                self._node_file.close()
        self.seconds = time.perf_counter() - begun

    def tensors(self) -> buckets.NamedTensors:
        """What has arrived, by name."""
        return buckets.unpack(self.manifest.tensors, self.staging)

    def give_up(self) -> None:
        """End a download, which may have hours left. A collective ends at its own deadline: to
        leave one from another thread would be to wait for it.
        """
        if isinstance(self.transport, DownloadTransport):
            self.transport.close()

    def fits(self, sizes: Sequence[int], place: str) -> bool:
        """Return True if its buckets can take a version of these sizes."""
        return [len(each) for each in self.staging] == list(sizes) and all(
            str(each.device) == place for each in self.staging
        )

    def look(self) -> WorkerReport:
        """The digest of what arrived, or that it is pending; raises what went wrong on the way."""
        if self.is_alive():
            return WorkerReport(pending=True)
        if self._error is not None:
            raise self._error
        return WorkerReport(self._digest, receive_s=self.seconds)


def _use(device: torch.device | str) -> None:
    """Have this thread's work go to the model's GPU, where it lies on one."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


def failure(error: WeightSyncError) -> bytes:
    """An encoded WorkerReport of a failed call."""
    return encode(WorkerReport(error=describe(error)))

"""Transports of a version's bytes: one interface, six kinds, selected from devices and nodes.

    gloo       CPUs, or whatever mixture no other way can join; over the network
    nccl       the learner and every actor on a GPU of their own
    cuda_ipc   the learner and every actor on one and the same GPU
    snapshot   files in a folder that all nodes see, on one machine perhaps /dev/shm; when asked for
    node       a file from one actor to the others of its node; rank 0 has no part in it
    http       a download from the learner's host, by an actor that comes late; it has no group

Rank 0 is the learner. The learner calls `host`, tells the actors where, then `form`; an actor calls
`join`. Buckets are uint8 tensors. Every wait has a deadline.

A group is formed on a thread of its own, which alone waits for the other ranks.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch

from weight_sync.protocol import Rendezvous, TransportFailed
from weight_sync.transports.collective import GlooTransport, NcclTransport
from weight_sync.transports.cuda_ipc import CudaIpcTransport
from weight_sync.transports.download import DownloadTransport
from weight_sync.transports.node_file import NodeTransport
from weight_sync.transports.snapshot import SnapshotTransport

_KINDS = {
    each.kind: each for each in (GlooTransport, NcclTransport, CudaIpcTransport, SnapshotTransport)
}
_JOINED = {**_KINDS, **{each.kind: each for each in (NodeTransport, DownloadTransport)}}


class Transport(Protocol):
    """One rank of the group that carries the bytes."""

    rendezvous: Rendezvous

    def form(self) -> Self:
        """Connect to the other ranks. Raises TransportFailed after `rendezvous.timeout_s`."""

    def broadcast(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Send the buckets (rank 0) or fill them (others), in order. Raises TransportFailed."""

    def place(self) -> str:
        """The device of a receiver's buckets: `cpu` or `cuda`."""

    def close(self) -> None:
        """Leave the group and, on rank 0, end it."""


def device_name(device: torch.device | str) -> str:
    """A device's name in messages: `cpu`, or `cuda:GPU-c1b2...`, the same in every process."""
    kind = torch.device(device)
    if kind.type != "cuda":
        return str(kind.type)
    return f"cuda:GPU-{torch.cuda.get_device_properties(kind).uuid}"


def host(
    kind: str, address: str, world_size: int, incarnation: int, epoch: int, timeout_s: float
) -> Transport:
    """Begin a group as rank 0; returns at once.

    `address` is where its store listens or, of a snapshot, the folder to make its own in.
    """
    return _KINDS[kind].host(address, world_size, incarnation, epoch, timeout_s)


def join(rendezvous: Rendezvous) -> Transport:
    """Take part in the group of a Rendezvous; blocks until it is formed. Raises TransportFailed."""
    return _JOINED[rendezvous.transport].join(rendezvous)


class Forming(threading.Thread):
    """The forming of a group, on a thread: a collective waits for a rank that has died until its
    time is out. A caller that gives up earlier leaves the thread behind.
    """

    def __init__(self, epoch: int, form: Callable[[], Transport]) -> None:
        super().__init__(name="weight-group", daemon=True)
        self._epoch, self._form = epoch, form
        self._transport: Transport | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Reach the store, then every other rank."""
        try:
            self._transport = self._form()
        except Exception as error:  # noqa: BLE001 - raised again by `finish`
            self._error = error

    def done(self, within_s: float) -> bool:
        """Return True if forming ends, well or not, within so many seconds."""
        self.join(within_s)
        return not self.is_alive()

    def finish(self, deadline_s: float) -> Transport:
        """The group; raises what went wrong on the way, TransportFailed at the deadline."""
        self.join(deadline_s)
        if self._error is not None:
            raise self._error
        if self._transport is None:
            raise TransportFailed(
                f"epoch {self._epoch}: the group was not formed within {deadline_s:g} s"
            )
        return self._transport

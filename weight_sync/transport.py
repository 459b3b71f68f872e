"""The collective that carries the bytes: gloo between unrelated processes, no default group.

Consumes and produces buckets (uint8 tensors). Waits, each wait with a deadline: for all ranks to
form the group, and inside a broadcast for every peer; unblocked by the peers, or by the deadline
(TransportFailed). The group is built from a store and the back-end class directly:
`init_process_group` is never called, so the learner's own default group (DeepSpeed) and vLLM's are
not touched.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from weight_sync.protocol import Rendezvous, TransportFailed, WeightSyncError


class GlooTransport:
    """One rank of the broadcast group; rank 0, the learner, hosts the store and sends.

    The learner calls `host`, tells the actors where, then `form`; an actor calls `join`.
    """

    def __init__(self, store: TCPStore, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._store: TCPStore | None = store
        self._group: ProcessGroupGloo | None = None

    @classmethod
    def host(
        cls, address: str, world_size: int, incarnation: int, epoch: int, timeout_s: float
    ) -> "GlooTransport":
        """Open the store at `address` on a free port, as rank 0; returns at once."""
        # The store is handed a bound socket: left to itself it listens on every interface.
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        prefix = f"forage/weight_sync/{incarnation}/{epoch}"
        where = (address, port, prefix)
        return cls(store, Rendezvous(incarnation, epoch, *where, 0, world_size, timeout_s))

    @classmethod
    def join(cls, rendezvous: Rendezvous) -> "GlooTransport":
        """Reach the learner's store and form the group; blocks until every rank is there."""
        where = f"{rendezvous.store_host}:{rendezvous.store_port}"
        try:
            store = TCPStore(
                rendezvous.store_host,
                rendezvous.store_port,
                is_master=False,
                timeout=timedelta(seconds=rendezvous.timeout_s),
            )
        except RuntimeError as error:
            raise TransportFailed(
                f"cannot reach the learner's store at {where}: {error}"
            ) from error
        return cls(store, rendezvous).form()

    def form(self) -> "GlooTransport":
        """Connect to every other rank. Raises TransportFailed after the rendezvous' `timeout_s`."""
        here, hosted = self.rendezvous, self._store
        if hosted is None:
            raise TransportFailed(f"rank {here.rank} has left the group {here.prefix!r}")
        options = ProcessGroupGloo._Options()
        address = _own_address(here.store_host, here.store_port)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=here.timeout_s)
        store = PrefixStore(here.prefix, hosted)
        try:
            self._group = ProcessGroupGloo(store, here.rank, here.world_size, options)
        except RuntimeError as error:
            raise TransportFailed(
                f"rank {here.rank} of {here.world_size} could not form the group {here.prefix!r} "
                f"within {here.timeout_s:g} s: {error}"
            ) from error
        return self

    def broadcast(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Send the buckets (rank 0) or fill them (others), in order. Raises TransportFailed."""
        if self._group is None:
            raise TransportFailed(f"rank {self.rendezvous.rank}: the group is not formed")
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        try:
            for bucket in buckets:
                self._group.broadcast([bucket], options).wait()
        except RuntimeError as error:
            raise TransportFailed(
                f"rank {self.rendezvous.rank}: the broadcast of {sum(map(len, buckets))} bytes "
                f"failed (deadline {timeout_s:g} s): {error}"
            ) from error

    def close(self) -> None:
        """Leave the group and, on rank 0, stop listening."""
        self._group = self._store = None


class Forming(threading.Thread):
    """A way into a group, on a thread: gloo waits for a rank that has died until its time is out,
    and nobody need wait with it. Whoever gives up leaves the thread behind.
    """

    def __init__(self, epoch: int, form: Callable[[], GlooTransport]) -> None:
        super().__init__(name="weight-group", daemon=True)
        self._epoch, self._form = epoch, form
        self._transport: GlooTransport | None = None
        self._error: WeightSyncError | None = None

    def run(self) -> None:
        """Reach the store, then every other rank."""
        try:
            self._transport = self._form()
        except WeightSyncError as error:
            self._error = error

    def done(self, within_s: float) -> bool:
        """Whether it has come to an end, good or bad, within so many seconds."""
        self.join(within_s)
        return not self.is_alive()

    def finish(self, deadline_s: float) -> GlooTransport:
        """The group; raises what went wrong on the way, TransportFailed at the deadline."""
        self.join(deadline_s)
        if self._error is not None:
            raise self._error
        if self._transport is None:
            raise TransportFailed(
                f"epoch {self._epoch}: the group was not formed within {deadline_s:g} s"
            )
        return self._transport


def _own_address(host: str, port: int) -> str:
    """The address of this machine that a peer on the way to `host` would see; sends no packet."""
    family = socket.getaddrinfo(host, port)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])

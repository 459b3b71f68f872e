"""Transports by collectives: gloo and NCCL between unrelated processes.

Buckets are uint8 tensors. Every wait, for all ranks to form the group and for each peer inside a
broadcast, has a deadline (TransportFailed). A group is built from a store and the back-end
class directly: `init_process_group` is never called, so the learner's own default group (DeepSpeed)
and vLLM's are not touched.
"""

import contextlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from configs.runtime.node import interface, own_address
from weight_sync.protocol import Rendezvous, TransportFailed

_LOOK_S = 0.001  # how often a broadcast between GPUs is looked after
_AT_ONCE = timedelta(seconds=1)  # what has ended is not waited for
_WATCHDOG = 10.0  # times our deadline: it is not torch's watchdog that ends a broadcast


class StoreTransport(ABC):
    """One rank of a group that meets in a store; rank 0, the learner, hosts it and sends."""

    kind: ClassVar[str]

    def __init__(self, store: TCPStore, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._store: TCPStore | None = store

    @classmethod
    def host(
        cls, address: str, world_size: int, incarnation: int, epoch: int, timeout_s: float
    ) -> Self:
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
        rendezvous = Rendezvous(
            incarnation=incarnation,
            epoch=epoch,
            transport=cls.kind,
            store_host=address,
            store_port=port,
            prefix=f"forage/weight_sync/{incarnation}/{epoch}",
            rank=0,
            world_size=world_size,
            timeout_s=timeout_s,
        )
        return cls(store, rendezvous)

    @classmethod
    def join(cls, rendezvous: Rendezvous) -> Self:
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

    def form(self) -> Self:
        """Connect to every other rank. Raises TransportFailed after the rendezvous' `timeout_s`."""
        here = self.rendezvous
        try:
            self._enter(PrefixStore(here.prefix, self._hosted()))
        except RuntimeError as error:
            raise TransportFailed(
                f"rank {here.rank} of {here.world_size} could not form the group {here.prefix!r} "
                f"within {here.timeout_s:g} s: {error}"
            ) from error
        return self

    def broadcast(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Send the buckets (rank 0) or fill them (others), in order. Raises TransportFailed."""
        try:
            self._carry(buckets, timeout_s)
        except RuntimeError as error:
            raise TransportFailed(
                f"rank {self.rendezvous.rank}: the broadcast of {sum(map(len, buckets))} bytes "
                f"failed (deadline {timeout_s:g} s): {error}"
            ) from error

    def place(self) -> str:
        """The device of a receiver's buckets: `cpu` or `cuda`."""
        return "cpu" if self.kind == "gloo" else "cuda"

    def close(self) -> None:
        """Leave the group and, on rank 0, stop listening."""
        self._store = None

    def _hosted(self) -> TCPStore:
        if self._store is None:
            here = self.rendezvous
            raise TransportFailed(f"rank {here.rank} has left the group {here.prefix!r}")
        return self._store

    @abstractmethod
    def _enter(self, store: PrefixStore) -> None:
        """Connect to every other rank."""

    @abstractmethod
    def _carry(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Send the buckets, or fill them."""


class _Collective(StoreTransport):
    """A group of torch's, made in `_enter`."""

    _group: Any = None

    def close(self) -> None:
        """Leave the group and, on rank 0, stop listening."""
        self._group = None
        super().close()

    @contextlib.contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Leave a group that has failed inside: a broadcast is whole, or the last of its group."""
        try:
            yield
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """End what may still run in the group, which is of no use any more."""
        self._group = None

    def _works(self, buckets: Iterable[torch.Tensor], timeout_s: float) -> Iterable[Any]:
        """Begin to broadcast one bucket after the other."""
        if self._group is None:
            raise TransportFailed(f"rank {self.rendezvous.rank}: the group is not formed")
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        for bucket in buckets:
            yield self._group.broadcast([bucket], options)


class GlooTransport(_Collective):
    """TCP between processes; what lies on a GPU is copied through the host."""

    kind = "gloo"

    def _enter(self, store: PrefixStore) -> None:
        here = self.rendezvous
        options = ProcessGroupGloo._Options()
        address = own_address(here.store_host, here.store_port)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=here.timeout_s)
        self._group = ProcessGroupGloo(store, here.rank, here.world_size, options)

    def _carry(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Each work ends by itself at `timeout_s`, and has ended when its `wait` raises."""
        with self._leaving_on_error():
            for work in self._works(buckets, timeout_s):
                work.wait()


class NcclTransport(_Collective):
    """Between GPUs, one for each rank: NCCL refuses two ranks on one."""

    kind = "nccl"

    def _enter(self, store: PrefixStore) -> None:
        """The ranks connect here, where somebody else counts the time, not in the first version."""
        from torch.distributed import ProcessGroupNCCL

        here = self.rendezvous
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG * here.timeout_s)
        if name := interface(own_address(here.store_host, here.store_port)):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # read once a process
        self._stream = torch.cuda.Stream()  # else it would queue behind what trains or generates
        with _bearing_errors():
            self._group = ProcessGroupNCCL(store, here.rank, here.world_size, options)
        self._carry([torch.zeros(1, dtype=torch.uint8, device="cuda")], here.timeout_s)

    def _carry(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Buckets on a host, the learner's or a receiver's, pass through one of the largest's size
        on its GPU.

        A rank that has died is noticed at the deadline. Then, and at every error, the group is
        aborted: NCCL's kernel waits for other ranks without end, and whatever synchronises with
        this GPU would wait for the kernel.
        """
        deadline, sends = time.monotonic() + timeout_s, self.rendezvous.rank == 0
        with self._leaving_on_error(), torch.cuda.stream(self._stream):
            for bucket, place in zip(buckets, _on_gpu(buckets, sends), strict=True):
                (work,) = self._works([place], timeout_s)
                if not completed(work, deadline):
                    raise TransportFailed(
                        f"rank {self.rendezvous.rank}: a rank was silent for {timeout_s:g} s"
                    )
                if place is not bucket and not sends:
                    bucket.copy_(place)
            self._stream.synchronize()

    def _leave(self) -> None:
        """Abort the communicator, and with it a kernel that spins."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def completed(work: Any, deadline: float) -> bool:
    """Wait until one of torch's works has ended; False at the deadline. Raises its RuntimeError.

    Only `wait` with a time tells how: of a work on NCCL `is_success` always raises, and a `wait`
    without a time asks for no error (torch 2.13, ProcessGroupNCCL.cpp).
    """
    while not work.is_completed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    work.wait(_AT_ONCE)
    return True


@contextlib.contextmanager
def _bearing_errors() -> Iterator[None]:
    """A group that is made inside never ends the process when it fails: that is for us to say."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _on_gpu(buckets: Sequence[torch.Tensor], filled: bool) -> Iterable[torch.Tensor]:
    """The buckets, or room for them, each on the GPU in its turn; most receivers' are there."""
    through = torch.empty(0, dtype=torch.uint8)
    for bucket in buckets:
        if bucket.is_cuda:
            yield bucket
            continue
        if not len(through):
            size = max(map(len, buckets))
            through = torch.empty(size, dtype=torch.uint8, device="cuda")
        place = through[: len(bucket)]
        yield place.copy_(bucket, non_blocking=True) if filled else place

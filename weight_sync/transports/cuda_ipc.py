"""Transport between processes on one GPU: rank 0 shows its memory, the others copy from it.

Rank 0 copies the buckets to its own on the GPU, made once, whose memory the others map. Receivers
wait, with deadlines, for the store and there for rank 0's handles; rank 0 waits for nobody (the
digest tells what a receiver has copied). vLLM's own engine for this reads pickled handles from its
caller; these are a msgpack tuple of plain values.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import msgspec
import torch
from torch.distributed import PrefixStore, TCPStore

from weight_sync.protocol import Rendezvous, TransportFailed
from weight_sync.transports.collective import StoreTransport

# As torch's UntypedStorage gives and takes it: device, handle, bytes, offset, reference counter's
# handle and offset, event's handle, whether the event is to be waited for.
_Shared = tuple[int, bytes, int, int, bytes, int, bytes, bool]
_decode = msgspec.msgpack.Decoder(tuple[str, list[_Shared]]).decode


class _Shown:
    """Buckets on the GPU that other processes may map: made once and never let go, as torch keeps
    what a killed process had mapped.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.buckets = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        handles = [each.untyped_storage()._share_cuda_() for each in self.buckets]
        self.told = msgspec.msgpack.encode((_gpu(), handles))


class CudaIpcTransport(StoreTransport):
    """One rank; all of them are on one GPU."""

    kind = "cuda_ipc"
    _shown: ClassVar[dict[tuple[int, ...], _Shown]] = {}  # by the buckets' sizes

    def __init__(self, store: TCPStore, rendezvous: Rendezvous) -> None:
        super().__init__(store, rendezvous)
        self._keys: PrefixStore | None = None
        self._sent = 0  # broadcasts so far: all ranks count alike

    def close(self) -> None:
        """Leave the group."""
        self._keys = None
        super().close()

    def _enter(self, store: PrefixStore) -> None:
        self._keys = store
        self._stream = torch.cuda.Stream()  # else it would queue behind what trains or generates

    def _carry(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        if self._keys is None:
            raise TransportFailed(f"rank {self.rendezvous.rank}: the group is not formed")
        self._sent += 1
        key = f"handles/{self._sent}"
        with torch.cuda.stream(self._stream):
            if self.rendezvous.rank == 0:
                self._keys.set(key, self._show(buckets))
            else:
                self._keys.wait([key], timedelta(seconds=timeout_s))
                self._copy(self._keys.get(key), buckets)

    def _show(self, buckets: Sequence[torch.Tensor]) -> bytes:
        sizes = tuple(map(len, buckets))
        if sizes not in self._shown:
            self._shown[sizes] = _Shown(sizes)
        shown = self._shown[sizes]
        for place, bucket in zip(shown.buckets, buckets, strict=True):
            place.copy_(bucket, non_blocking=True)
        self._stream.synchronize()
        return shown.told

    def _copy(self, told: bytes, buckets: Sequence[torch.Tensor]) -> None:
        gpu, handles = _decode(told)
        if gpu != _gpu():
            raise TransportFailed(
                f"the learner is on GPU {gpu}, this actor on {_gpu()}: set weight_sync.transport "
                "to 'auto'"
            )
        for handle, bucket in zip(handles, buckets, strict=True):
            bucket.copy_(_opened(handle, bucket.device))
        self._stream.synchronize()


def _gpu() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _opened(shared: _Shared, device: torch.device) -> torch.Tensor:
    """Another process's bucket; its memory is let go with the tensor. GPUs may be numbered
    otherwise there."""
    index = torch.cuda.current_device()
    storage: Any = torch.UntypedStorage._new_shared_cuda(index, *shared[1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

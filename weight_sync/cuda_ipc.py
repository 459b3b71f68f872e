"""Between two processes on one GPU: the learner shows where the bytes lie, the others copy them.

Consumes and produces buckets (uint8 tensors); rank 0's are copied to buckets of its own on the GPU,
made once, whose memory the others map. Waits, with deadlines: for the store, and there for rank 0's
handles; rank 0 waits for nobody (what a receiver has copied, the digest tells). vLLM's own engine
for this reads pickled handles from its caller; these are a msgpack tuple of plain values.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore, TCPStore

from weight_sync.collective import StoreTransport
from weight_sync.protocol import Rendezvous, TransportFailed

# As torch's UntypedStorage gives and takes it: device, handle, bytes, offset, reference counter's
# handle and offset, event's handle, whether the event is to be waited for.
_Shared = tuple[int, bytes, int, int, bytes, int, bytes, bool]
_decode = msgspec.msgpack.Decoder(tuple[str, list[_Shared]]).decode


class CudaIpcTransport(StoreTransport):
    """One rank; all of them are on one GPU."""

    kind = "cuda_ipc"

    def __init__(self, store: TCPStore, rendezvous: Rendezvous) -> None:
        super().__init__(store, rendezvous)
        self._keys: PrefixStore | None = None
        self._sent = 0  # broadcasts so far: all ranks count alike
        self._shown: list[torch.Tensor] = []

    def close(self) -> None:
        """Leave the group and free what was shown."""
        self._keys, self._shown = None, []
        super().close()

    def _enter(self, store: PrefixStore) -> None:
        self._keys = store

    def _carry(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        if self._keys is None:
            raise TransportFailed(f"rank {self.rendezvous.rank}: the group is not formed")
        self._sent += 1
        key = f"handles/{self._sent}"
        if self.rendezvous.rank == 0:
            self._keys.set(key, self._show(buckets))
        else:
            self._keys.wait([key], timedelta(seconds=timeout_s))
            self._copy(self._keys.get(key), buckets)

    def _show(self, buckets: Sequence[torch.Tensor]) -> bytes:
        if [len(each) for each in self._shown] != [len(each) for each in buckets]:
            self._shown = [torch.empty_like(each, device="cuda") for each in buckets]
        for shown, bucket in zip(self._shown, buckets, strict=True):
            shown.copy_(bucket, non_blocking=True)
        torch.cuda.synchronize()
        handles = [each.untyped_storage()._share_cuda_() for each in self._shown]
        return msgspec.msgpack.encode((_gpu(), handles))

    def _copy(self, told: bytes, buckets: Sequence[torch.Tensor]) -> None:
        gpu, handles = _decode(told)
        if gpu != _gpu():
            raise TransportFailed(
                f"the learner is on GPU {gpu}, this actor on {_gpu()}: set weight_sync.transport "
                "to 'auto'"
            )
        for handle, bucket in zip(handles, buckets, strict=True):
            bucket.copy_(_opened(handle, bucket.device))
        torch.cuda.synchronize()


def _gpu() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _opened(shared: _Shared, device: torch.device) -> torch.Tensor:
    """Another process's bucket; its memory is let go with the tensor. GPUs may be numbered
    otherwise there."""
    index = torch.cuda.current_device()
    storage: Any = torch.UntypedStorage._new_shared_cuda(index, *shared[1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

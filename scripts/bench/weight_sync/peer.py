"""A receiving process of `forage bench weight-sync`.

`python -m scripts.bench.weight_sync.peer forage NAME ENDPOINT DEVICE TENSORS BYTES` follows a
publisher with a bare model; `raw RANK WORLD FILE TENSORS BYTES` takes part in plain collectives, as
rank 0 says. It ends with its parent.
"""

import asyncio
import sys
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from configs.runtime.process import begin
from configs.schema import WeightSyncConfig
from weight_sync.buckets import Layout, NamedTensors, digest, dtype_name
from weight_sync.receiver import Receiver
from weight_sync.subscriber import Subscriber

PROBE = tuple(range(7, 7 * 65, 7))
CONFIG = WeightSyncConfig(
    probe_tolerance=1e-6, join_deadline_s=120.0, publish_deadline_s=120.0, probe_tokens=len(PROBE)
)
DEADLINE_S = 600.0
STOP, FLAT, EACH = range(3)  # what rank 0 says comes next


def model(tensors: int, nbytes: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """`tensors` vectors of float32, `nbytes` bytes in all."""
    length = max(1, nbytes // 4 // tensors)
    return {
        f"layer.{i}.weight": torch.full((length,), float(i), device=device) for i in range(tensors)
    }


def probe(weights: dict[str, torch.Tensor], tokens: Sequence[int]) -> list[float]:
    """Numbers in place of log-probs: one number of one tensor for each token but the first."""
    vectors = list(weights.values())
    chosen = (vectors[token % len(vectors)] for token in tokens[1:])
    return [float(v[t % len(v)]) for v, t in zip(chosen, tokens[1:], strict=True)]


def join(rank: int, world: int, file: str) -> None:
    """Enter the plain group on the loopback, whose processes find each other by a new file."""
    limit = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", f"file://{file}", limit, rank=rank, world_size=world)


class BareEngine:
    """A ServingEngine around bare tensors; nothing is generated, so nothing has to pause."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.version = -1
        device = next(iter(weights.values())).device
        self.receiver = Receiver(self._layout, self._load, self._checksum, device)

    async def pause(self) -> None:
        """Do nothing: nothing is generated."""

    async def resume(self) -> None:
        """Do nothing: nothing was paused."""

    async def set_policy_version(self, version: int) -> None:
        """Remember the label."""
        self.version = version

    async def call_workers(self, method: str, *args: bytes | int | str | float) -> list[bytes]:
        """Call the one worker, this process."""
        work = getattr(self.receiver, method.removeprefix("weight_sync_"))
        return [await asyncio.to_thread(work, *args)]

    async def score(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], int]:
        """float32[n - 1], of the weights that are there; and their version."""
        return np.asarray(probe(self.weights, tokens), np.float32), self.version

    def _layout(self) -> Layout:
        return {n: (tuple(t.shape), dtype_name(t.dtype)) for n, t in self.weights.items()}

    def _load(self, named_tensors: NamedTensors) -> None:
        for name, tensor in named_tensors:
            self.weights[name].copy_(tensor)

    def _checksum(self, _: NamedTensors) -> str:
        return digest(tensor.view(torch.uint8) for tensor in self.weights.values())


def obey(weights: dict[str, torch.Tensor]) -> None:
    """Receive what rank 0 sends until it says stop."""
    flat = torch.zeros(sum(w.numel() for w in weights.values()))
    order = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(order, 0)
        if order == STOP:
            return
        for tensor in [flat] if order == FLAT else weights.values():
            dist.broadcast(tensor, 0)


def main(words: Sequence[str]) -> None:
    """Receive until stopped."""
    kind, *where, tensors, nbytes = words
    begin(f"{kind}-{where[0]}")
    torch.set_num_threads(1)
    size = (int(tensors), int(nbytes))
    if kind == "raw":
        rank, world, file = where
        join(int(rank), int(world), file)
        obey(model(*size))
        dist.destroy_process_group()
    else:
        name, endpoint, device = where
        engine = BareEngine(model(*size, device))
        asyncio.run(Subscriber(name, endpoint, engine, CONFIG).run())


if __name__ == "__main__":
    main(sys.argv[1:])

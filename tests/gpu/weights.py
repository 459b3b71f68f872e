"""Weights on a GPU: pinned staging, an NCCL group of one, CUDA IPC to another process; and FAISS.

Torch alone is enough for the first three (the digest of staging needs numpy): where msgspec and
blake3 are missing they have stand-ins, and say so. FAISS is skipped by name where it is not there.
`python -m tests.gpu.weights RENDEZVOUS BYTES` is the receiver of the CUDA IPC check.
"""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.gpu.check import Check, Figure, Skipped, at_least, at_most
from tests.gpu.stand_ins import stand_in

NBYTES, DEADLINE_S = 1 << 30, 120.0


def modules() -> Iterator[Figure]:
    """Yield what stands in for missing modules, where any is."""
    if missing := stand_in():
        yield Figure("modules", f"stand-ins for {', '.join(missing)}", "enough for this check")


def pinned_staging(nbytes: int = NBYTES, device: str = "cuda") -> Iterator[Figure]:
    """Yield whether staging buckets are pinned and hold the GPU's bytes, and how fast they fill."""
    import torch

    yield from modules()
    from weight_sync.buckets import BucketViews, allocate, digest, plan

    torch.manual_seed(0)
    weights = {f"w{n}": torch.randn(nbytes // 8, device=device).bfloat16() for n in range(4)}
    specs, sizes = plan(weights.items(), 256 << 20)
    buckets = allocate(sizes)
    pinned = all(bucket.is_pinned() for bucket in buckets)
    yield Figure("buckets", "pinned" if pinned else "pageable", "pinned", pinned)
    views = BucketViews(specs, buckets)
    views.pack(weights.items())
    begun = time.perf_counter()
    views.pack(weights.items())
    yield at_least("GPU to host", sum(sizes) / 1e9 / (time.perf_counter() - begun), 10, " GB/s")
    same = digest(buckets) == digest([bucket.to(device) for bucket in buckets])
    yield Figure("digest", "equal" if same else "another", "equal on both sides", same)


def nccl_group_of_one() -> Iterator[Figure]:
    """Yield how long our NCCL transport takes to send 1 GB to nobody."""
    import torch

    yield from modules()
    from weight_sync.transports.collective import NcclTransport

    transport = NcclTransport.host("127.0.0.1", 1, 1, 1, DEADLINE_S).form()
    try:
        for place in ("cuda", "cpu"):
            bucket = torch.ones(NBYTES, dtype=torch.uint8, device=place)
            begun = time.perf_counter()
            transport.broadcast([bucket], DEADLINE_S)
            yield at_most(f"broadcast from {place}", time.perf_counter() - begun, 5.0, " s")
            changed = int((bucket != 1).sum())
            yield at_most(f"bytes changed, {place}", changed, 0)
    finally:
        transport.close()


def cuda_ipc() -> Iterator[Figure]:
    """Yield what another process on this GPU has copied from our memory, and how fast."""
    import torch

    yield from modules()
    from weight_sync.transports.cuda_ipc import CudaIpcTransport

    transport = CudaIpcTransport.host("127.0.0.1", 2, 1, 1, DEADLINE_S)
    command = [sys.executable, "-m", "tests.gpu.weights", told(transport.rendezvous)]
    bucket = torch.randint(256, (NBYTES,), dtype=torch.uint8)
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, str(NBYTES)], stdout=pipe, stderr=pipe, text=True) as peer:
        try:
            transport.form()
            for _ in range(2):  # the first one maps the memory
                transport.broadcast([bucket], DEADLINE_S)
            said, errors = peer.communicate(timeout=DEADLINE_S)
        finally:
            peer.kill()
            transport.close()
    if peer.returncode:
        raise RuntimeError(f"the receiver: {errors.strip().splitlines()[-1]}")
    total, seconds = json.loads(said)
    same = total == int(bucket.sum(dtype=torch.int64))
    yield Figure("bytes received", "equal" if same else "others", "equal", same)
    yield at_least("copied there", NBYTES / 1e9 / seconds, 20, " GB/s")


def told(rendezvous: Any) -> str:
    """A Rendezvous as the second rank gets it, on a command line."""
    fields = {name: getattr(rendezvous, name) for name in type(rendezvous).__annotations__}
    return json.dumps(fields | {"rank": 1})


def receive(rendezvous: str, nbytes: str) -> None:
    """Receive two broadcasts; print the sum of the bytes and the second one's seconds."""
    import torch

    stand_in()
    from weight_sync.protocol import Rendezvous
    from weight_sync.transports.cuda_ipc import CudaIpcTransport

    transport = CudaIpcTransport.join(Rendezvous(**json.loads(rendezvous)))
    bucket, seconds = torch.zeros(int(nbytes), dtype=torch.uint8, device="cuda"), 0.0
    torch.cuda.synchronize()
    for _ in range(2):
        begun = time.perf_counter()
        transport.broadcast([bucket], DEADLINE_S)
        seconds = time.perf_counter() - begun
    print(json.dumps([int(bucket.sum(dtype=torch.int64)), seconds]), flush=True)


def faiss_on_gpu() -> Iterator[Figure]:
    """Yield how many of the CPU's neighbours a GPU index finds."""
    import numpy as np

    faiss: Any = importlib.import_module("faiss")
    if not getattr(faiss, "get_num_gpus", int)():
        raise Skipped("this FAISS has no GPU code, or sees no GPU")
    rng = np.random.default_rng(0)
    vectors, queries = (rng.standard_normal((n, 256)).astype(np.float32) for n in (100_000, 256))
    flat = faiss.IndexFlatIP(256)
    flat.add(vectors)
    on_gpu = faiss.index_cpu_to_all_gpus(flat)
    begun = time.perf_counter()
    found = on_gpu.search(queries, 10)[1]
    seconds = time.perf_counter() - begun
    same = float((np.sort(found) == np.sort(flat.search(queries, 10)[1])).mean())
    yield Figure("neighbours as on the CPU", f"{same:.4f}", "at least 0.99", same >= 0.99)
    yield at_least("queries", len(queries) / seconds, 1000, "/s")


def checks() -> list[Check]:
    """Every check of weights and vectors."""
    return [
        Check("pinned staging", pinned_staging, ("torch", "numpy")),
        Check("NCCL group of one", nccl_group_of_one),
        Check("CUDA IPC", cuda_ipc),
        Check("FAISS", faiss_on_gpu, ("torch", "numpy", "faiss")),
    ]


if __name__ == "__main__":
    receive(*sys.argv[1:])

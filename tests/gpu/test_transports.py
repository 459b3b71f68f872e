"""Weights from a learner on a GPU to receivers on GPUs, each a process of its own."""

from pathlib import Path

import msgspec
import pytest
import torch

from scripts.bench.weight_sync.peer import CONFIG, model
from scripts.bench.weight_sync.run import Row, peers, published
from weight_sync.buckets import BucketViews, allocate, digest, plan, unpack
from weight_sync.protocol import TransportFailed
from weight_sync.publisher import Publisher
from weight_sync.transports.collective import NcclTransport

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ROW = Row(4_000_000, 40, 1)
one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WAYS = [
    pytest.param("auto", "cuda:0", marks=one),
    pytest.param("cuda_ipc", "cuda:0", marks=one),
    pytest.param("gloo", "cuda:0", marks=one),
    pytest.param("snapshot", "cuda:0", marks=one),
    pytest.param("auto", "cpu", marks=one),
    pytest.param("auto", "cuda:1", marks=two),
    pytest.param("nccl", "cuda:1", marks=two),
]


@pytest.mark.parametrize(("transport", "receiver"), WAYS)
def test_versions_arrive_verified(transport: str, receiver: str, tmp_path: Path) -> None:
    weights, endpoint = model(ROW.tensors, ROW.nbytes, "cuda"), f"ipc://{tmp_path}/sync"
    config = msgspec.structs.replace(CONFIG, transport=transport)
    words = [["forage", "actor-0", endpoint, receiver]]
    with peers(words, ROW, tmp_path), Publisher(config, 1, 1, endpoint) as publisher:
        publisher.wait_for_actors(120.0)
        for version in range(5):
            for weight in weights.values():
                weight.mul_(1.5)
            published(publisher, version, weights)
        assert publisher.gauges()["sync/updates"] == 5
        assert publisher.gauges()["sync/refits"] == 0


@one
def test_buckets_are_written_by_nobody_else_once_they_are_given() -> None:
    """An engine's stream has forward passes queued; a transport writes on another one."""
    busy, own = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(500_000_000)  # cycles, a fifth of a second or more
        (bucket,) = allocate((1 << 20,), "cuda:0")
    with torch.cuda.stream(own):
        bucket.fill_(7)
    torch.cuda.synchronize()
    assert int((bucket != 7).sum()) == 0


@one
def test_a_group_of_one_by_nccl_sends_and_ends() -> None:
    """The only group of NCCL that one GPU can form: buckets of the host and of the GPU."""
    alone = NcclTransport.host("127.0.0.1", 1, 7, 1, 60.0).form()
    buckets = [torch.arange(100, dtype=torch.uint8), torch.ones(5, dtype=torch.uint8).cuda()]
    for _ in range(3):
        alone.broadcast(buckets, 60.0)
    assert torch.equal(buckets[0], torch.arange(100, dtype=torch.uint8))
    assert torch.equal(buckets[1].cpu(), torch.ones(5, dtype=torch.uint8))
    alone.close()
    with pytest.raises(TransportFailed, match="the group is not formed"):
        alone.broadcast(buckets, 60.0)


@one
def test_staging_is_pinned_and_holds_what_the_gpu_held() -> None:
    weights = {"a": torch.randn(1000, device="cuda"), "b": torch.randn(7, 3, device="cuda").half()}
    specs, sizes = plan(weights.items(), 4096)
    buckets = allocate(sizes)
    assert all(bucket.is_pinned() for bucket in buckets)
    BucketViews(specs, buckets).pack(weights.items())
    assert all(torch.equal(held, weights[name].cpu()) for name, held in unpack(specs, buckets))
    assert digest(buckets) == digest([bucket.cuda() for bucket in buckets])

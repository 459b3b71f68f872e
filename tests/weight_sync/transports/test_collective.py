"""The end of a collective: completed, failed, or given up at the deadline."""

import threading
import time
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch

from weight_sync.protocol import TransportFailed
from weight_sync.transports import collective
from weight_sync.transports.collective import GlooTransport, NcclTransport, completed


class Polled(GlooTransport):
    """gloo, waited for as NCCL is."""

    def _carry(self, buckets: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for work in self._works(buckets, timeout_s):
            if not completed(work, deadline):
                raise TransportFailed("late")


def pair(kind: type[GlooTransport] = Polled) -> tuple[GlooTransport, GlooTransport]:
    """Two ranks of one group."""
    learner = kind.host("127.0.0.1", 2, 7, 1, 10.0)
    where = msgspec.structs.replace(learner.rendezvous, rank=1)
    joined: list[GlooTransport] = []
    joining = threading.Thread(target=lambda: joined.append(kind.join(where)))
    joining.start()
    learner.form()
    joining.join(10)
    return learner, joined[0]


class Unfinished:
    """A work that nobody completes."""

    def is_completed(self) -> bool:
        return False


class FakeGroup:
    """A communicator of one kind of work, as ProcessGroupNCCL is used."""

    def __init__(self, work: Any) -> None:
        self.work, self.aborted = work, 0

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self.work

    def abort(self) -> None:
        self.aborted += 1


def over_nccl(work: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[NcclTransport, FakeGroup]:
    """NCCL's rank of a formed group whose works are such."""
    monkeypatch.setattr(collective, "_on_gpu", lambda buckets, _: buckets)
    transport, group = NcclTransport.host("127.0.0.1", 1, 7, 1, 10.0), FakeGroup(work)
    transport._stream, transport._group = None, group
    return transport, group


class Broken:
    """A work that ended by an error, as WorkNCCL tells it: its is_success only raises."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self, timeout: timedelta) -> bool:
        raise RuntimeError("unhandled system error")


def test_a_group_of_one_completes() -> None:
    alone = Polled.host("127.0.0.1", 1, 7, 1, 10.0).form()
    bucket = torch.arange(100, dtype=torch.uint8)
    alone.broadcast([bucket], 10.0)
    assert torch.equal(bucket, torch.arange(100, dtype=torch.uint8))


def test_buckets_arrive_by_polling() -> None:
    learner, actor = pair()
    sent, kept = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    sending = threading.Thread(target=learner.broadcast, args=([sent], 10.0))
    sending.start()
    actor.broadcast([kept], 10.0)
    sending.join(10)
    assert torch.equal(sent, kept)


def test_a_rank_that_has_left_is_an_error_and_no_success() -> None:
    learner, actor = pair()
    learner.close()
    with pytest.raises(TransportFailed, match="rank 1: the broadcast of 100 bytes failed"):
        actor.broadcast([torch.zeros(100, dtype=torch.uint8)], 10.0)


def test_a_work_that_failed_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="unhandled system error"):
        completed(Broken(), time.monotonic() + 1.0)


def test_a_communicator_is_aborted_when_a_broadcast_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its kernel spins on, and the next torch.cuda.synchronize of anybody waits for it."""
    transport, group = over_nccl(Broken(), monkeypatch)
    with pytest.raises(TransportFailed, match=r"100 bytes failed .*: unhandled system error"):
        transport.broadcast([torch.zeros(100, dtype=torch.uint8)], 10.0)
    assert group.aborted == 1
    with pytest.raises(TransportFailed, match="the group is not formed"):
        transport.broadcast([torch.zeros(100, dtype=torch.uint8)], 10.0)
    transport.close()
    assert group.aborted == 1


def test_a_communicator_is_aborted_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, group = over_nccl(Unfinished(), monkeypatch)
    with pytest.raises(TransportFailed, match=r"a rank was silent for 0\.05 s"):
        transport.broadcast([torch.zeros(100, dtype=torch.uint8)], 0.05)
    assert group.aborted == 1


def test_over_gloo_a_broadcast_that_failed_leaves_the_group() -> None:
    learner, actor = pair(GlooTransport)
    learner.close()
    for said in ("rank 1: the broadcast of 100 bytes failed", "the group is not formed"):
        with pytest.raises(TransportFailed, match=said):
            actor.broadcast([torch.zeros(100, dtype=torch.uint8)], 10.0)


def test_a_silent_work_is_given_up_at_the_deadline() -> None:
    begun = time.monotonic()
    assert not completed(Unfinished(), begun + 0.05)
    assert time.monotonic() - begun < 1.0

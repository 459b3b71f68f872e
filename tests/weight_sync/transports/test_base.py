"""Which way the bytes go, and versions as files."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from configs.load import ConfigError, parse
from weight_sync import broadcast
from weight_sync.protocol import (
    TransportFailed,
    TransportUnusable,
    WeightSyncError,
    WorkerReport,
    encode,
)
from weight_sync.transports.base import device_name
from weight_sync.transports.selection import choose
from weight_sync.transports.snapshot import SnapshotTransport

ONE, TWO, THREE = (f"cuda:GPU-{i}" for i in range(3))
CASES = [
    ("cpu", ("cpu", "cpu"), "gloo"),
    (ONE, (ONE,), "cuda_ipc"),
    (ONE, (ONE, ONE), "cuda_ipc"),
    (ONE, (TWO, THREE), "nccl"),
    (ONE, (TWO, TWO), "gloo"),
    (ONE, (ONE, TWO), "gloo"),
    (ONE, ("cpu",), "gloo"),
    ("cpu", (ONE,), "gloo"),
]
# The same, of actors whose engines have several workers
SHARED_OUT = [
    ("cpu", (("cpu", "cpu"),), "gloo"),
    (ONE, ((TWO, THREE),), "nccl"),
    (ONE, ((ONE, TWO),), "gloo"),
    (ONE, ((TWO, THREE), (THREE, TWO)), "gloo"),
]


@pytest.mark.parametrize(("own", "others", "kind"), CASES)
def test_the_devices_say_how_the_bytes_go(own: str, others: tuple[str, ...], kind: str) -> None:
    actors = {f"actor-{i}": (device,) for i, device in enumerate(others)}
    assert choose("auto", own, actors) == kind
    assert choose("snapshot", own, actors) == "snapshot" and choose("gloo", own, actors) == "gloo"


@pytest.mark.parametrize(("own", "others", "kind"), SHARED_OUT)
def test_so_do_those_of_an_engine_s_workers(
    own: str, others: tuple[tuple[str, ...], ...], kind: str
) -> None:
    assert choose("auto", own, {f"actor-{i}": each for i, each in enumerate(others)}) == kind


def test_a_transport_that_the_devices_cannot_do_is_refused_with_both_sides() -> None:
    said = (
        rf"'nccl' needs a GPU for each model, or worker .*: the learner is on {ONE}, a.* on {ONE}"
    )
    with pytest.raises(TransportUnusable, match=said):
        choose("nccl", ONE, {"actor-0": (ONE,)})
    with pytest.raises(TransportUnusable, match=r"every model on one GPU.*actor-0 on cpu"):
        choose("cuda_ipc", "cpu", {"actor-0": ("cpu",)})
    said = rf"actors.tensor_parallel = 1\): the learner is on {ONE}, actor-0 on {ONE} and {TWO};"
    with pytest.raises(TransportUnusable, match=said):
        choose("cuda_ipc", ONE, {"actor-0": (ONE, TWO)})


async def test_the_learner_ends_by_that_name(fleet) -> None:
    fleet.add("actor-0")
    with fleet.publisher(1, msgspec.structs.replace(fleet.config, transport="nccl")) as publisher:
        fleet.publish(publisher, 0)
        with pytest.raises(TransportUnusable, match="learner is on cpu, actor-0 on cpu"):
            await asyncio.to_thread(publisher.wait_applied, 0, 10.0)


async def test_a_late_actor_that_it_cannot_reach_is_refused_and_the_others_go_on(
    fleet, monkeypatch
) -> None:
    def only_hosts(asked: str, own: str, actors: dict[str, tuple[str, ...]]) -> str:
        if any(devices != ("cpu",) for devices in actors.values()):
            raise TransportUnusable("not between these")
        return "gloo"

    monkeypatch.setattr(broadcast, "choose", only_hosts)
    fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await asyncio.to_thread(publisher.wait_applied, 0, 10.0)
        stranger = fleet.add("actor-1")
        stranger.receiver.device = lambda: encode(WorkerReport(devices=(ONE,)))
        with pytest.raises(WeightSyncError, match="refused: TransportUnusable: not between these"):
            await asyncio.wait_for(fleet.tasks[1], 20)
        fleet.publish(publisher, 1)
        await asyncio.to_thread(publisher.wait_applied, 1, 10.0)


def test_a_device_has_a_name() -> None:
    assert device_name("cpu") == device_name(torch.device("cpu")) == "cpu"


async def test_versions_go_as_files(fleet, tmp_path: Path) -> None:
    """Also to one who comes late; the last two of a group are kept, and none is left."""
    (folder := tmp_path / "shared").mkdir()
    config = msgspec.structs.replace(fleet.config, transport="snapshot", snapshot_dir=str(folder))
    engines = [fleet.add("actor-0"), fleet.add("actor-1")]
    with fleet.publisher(2, config) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        for version in range(4):
            weights = fleet.publish(publisher, version)
            await asyncio.to_thread(publisher.wait_applied, version, 10.0)
        assert len(list(folder.glob("weights-7-1-*/*"))) == 2
        engines.append(fleet.add("actor-2"))
        while fleet.subscribers[2].verified != (7, 3):
            await asyncio.sleep(0.01)
        assert all(torch.equal(each.weights["head"], weights["head"]) for each in engines)
    assert list(folder.iterdir()) == []


def joined(tmp_path: Path) -> tuple[SnapshotTransport, SnapshotTransport]:
    learner = SnapshotTransport.host(str(tmp_path), 2, 7, 1, 1.0).form()
    where = msgspec.structs.replace(learner.rendezvous, rank=1)
    return learner, SnapshotTransport.join(where)


def test_a_file_that_does_not_come_or_is_too_short_is_named(tmp_path: Path) -> None:
    learner, actor = joined(tmp_path)
    with pytest.raises(TransportFailed, match="did not appear in time"):
        actor.broadcast([torch.zeros(8, dtype=torch.uint8)], 0.05)
    learner.broadcast([], 1.0)
    learner.broadcast([torch.ones(4, dtype=torch.uint8)], 1.0)
    with pytest.raises(TransportFailed, match="too short"):
        actor.broadcast([torch.zeros(8, dtype=torch.uint8)], 1.0)


def test_a_folder_that_is_not_seen_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    learner, actor = joined(tmp_path)
    learner.close()
    with pytest.raises(TransportFailed, match=r"is not there: weight_sync\.snapshot_dir must be"):
        SnapshotTransport.join(actor.rendezvous)
    with pytest.raises(TransportFailed, match=r"snapshot_dir = '.*absent': cannot write there"):
        SnapshotTransport.host(str(tmp_path / "absent"), 2, 7, 1, 1.0)


def test_across_hosts_the_folder_must_be_named() -> None:
    text = "weight_sync: {transport: snapshot, endpoint: 'tcp://10.0.0.1:7000'}"
    with pytest.raises(ConfigError, match=r"needs weight_sync\.snapshot_dir"):
        parse(text, [], "test")

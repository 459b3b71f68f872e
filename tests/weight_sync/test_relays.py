"""Each version goes to another node once; there it is handed on by a file that is removed."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from tests.weight_sync.conftest import CONFIG, BareEngine, Fleet
from tests.weight_sync.test_workers import SharedEngine
from weight_sync import subscriber
from weight_sync.protocol import RelayFailed, Rendezvous, TransportFailed
from weight_sync.publisher import Publisher
from weight_sync.subscriber import Subscriber
from weight_sync.transports import node_file
from weight_sync.transports.collective import GlooTransport
from weight_sync.transports.node_file import NodeFile, NodeTransport, remove_leftovers

WHERE = Rendezvous(7, 1, "gloo", "", 0, "", 1, 2, 1.0, hand_on="abc", nbytes=8)
BYTES = 256  # of the tests' model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of relays' folders."""
    monkeypatch.setattr(subscriber, "JOIN_AGAIN_S", 0.1)
    monkeypatch.setattr(node_file, "BASES", (tmp_path,))
    return tmp_path / f"forage-{os.getuid()}-weights"


def join(fleet: Fleet, actor_id: str, node: str, engine: BareEngine | None = None) -> BareEngine:
    """Add an actor of another node."""
    engine = engine or BareEngine()
    built = Subscriber(actor_id, fleet.endpoint, engine, CONFIG, node=node)
    fleet.subscribers.append(built)
    fleet.tasks.append(asyncio.create_task(built.run()))
    return engine


async def applied(fleet: Fleet, publisher: Publisher, version: int) -> None:
    """Publish a version; every engine holds it."""
    weights = fleet.publish(publisher, version)
    await asyncio.to_thread(publisher.wait_applied, version, 20.0)
    for each in fleet.subscribers:
        held = each._engine.weights
        assert all(torch.equal(held[name], weights[name]) for name in weights), each._actor_id
        assert each.verified == (7, version) and each.serving.is_set()


def ranks_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that receive by a collective, as they do."""
    carry, seen = GlooTransport.broadcast, []

    def noting(transport: GlooTransport, staging: list[torch.Tensor], seconds: float) -> None:
        carry(transport, staging, seconds)
        seen.append(transport.rendezvous.rank)

    monkeypatch.setattr(GlooTransport, "broadcast", noting)
    return seen


async def test_the_learner_sends_each_version_once_a_node(
    fleet: Fleet, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.add("actor-0")
    for number in (1, 2, 3):
        join(fleet, f"actor-{number}", "far")
    seen = ranks_of(monkeypatch)
    with fleet.publisher(4) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        for version in range(3):
            await applied(fleet, publisher, version)
            assert publisher.gauges()["sync/sent_bytes"] == BYTES
        assert sorted(seen) == [0] * 3 + [1] * 3 + [2] * 3
        await until(lambda: not list(home.glob("*/*")), "the file is removed")


async def test_workers_of_one_engine_read_what_its_first_one_received(fleet: Fleet) -> None:
    join(fleet, "actor-0", "far", SharedEngine())
    join(fleet, "actor-1", "far")
    with fleet.publisher(2) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        for version in range(2):
            await applied(fleet, publisher, version)
            assert publisher.gauges()["sync/sent_bytes"] == BYTES


async def until(reached: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


async def test_what_reaches_the_relay_damaged_is_handed_to_nobody(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry, write, written = GlooTransport.broadcast, NodeFile.write, []

    def flips(transport: GlooTransport, staging: list[torch.Tensor], seconds: float) -> None:
        carry(transport, staging, seconds)
        if transport.rendezvous.rank and transport.rendezvous.epoch == 1:
            staging[0][:1].add_(1)

    def noting(file: NodeFile, staging: list[torch.Tensor]) -> None:
        written.append(file)
        write(file, staging)

    monkeypatch.setattr(GlooTransport, "broadcast", flips)
    monkeypatch.setattr(NodeFile, "write", noting)
    join(fleet, "actor-0", "far"), join(fleet, "actor-1", "far")
    with fleet.publisher(2) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        await applied(fleet, publisher, 0)
        gauges = publisher.gauges()
    assert gauges["sync/refits"] == 1 and len(written) == 1
    assert gauges["sync/sent_bytes"] == 2 * BYTES, "it was sent twice"


async def test_who_reads_compares_the_digest_for_itself(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, damaged = NodeFile.write, []

    def damages(file: NodeFile, staging: list[torch.Tensor]) -> None:
        copies = [bucket.clone() for bucket in staging]
        if not damaged:
            damaged.append(copies[0][:1].add_(1))
        write(file, copies)

    monkeypatch.setattr(NodeFile, "write", damages)
    engines = [join(fleet, f"actor-{number}", "far") for number in range(2)]
    with fleet.publisher(2) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        await applied(fleet, publisher, 0)
        assert publisher.gauges()["sync/refits"] == 1
    assert engines[1].calls.count("apply") == 1


async def test_where_a_relay_goes_another_one_hands_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, write, gone = asyncio.get_running_loop(), NodeFile.write, []

    def leaves(file: NodeFile, staging: list[torch.Tensor]) -> None:
        if gone:
            return write(file, staging)
        gone.append(fleet.subscribers.pop(0))
        loop.call_soon_threadsafe(fleet.tasks[0].cancel)
        os.close(file._lock)  # as when its process ends
        file._closed = True
        return None

    for number in range(3):
        join(fleet, f"actor-{number}", "far")
    with fleet.publisher(3) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        await applied(fleet, publisher, 0)
        monkeypatch.setattr(NodeFile, "write", leaves)
        fleet.publish(publisher, 1)
        both = ["actor-1", "actor-2"]
        await until(lambda: all(s.verified == (7, 1) for s in fleet.subscribers), "both have it")
        assert gone[0].verified == (7, 0) and list(publisher._channel.joined) == both
        await applied(fleet, publisher, 2)
        assert publisher.gauges()["sync/sent_bytes"] == BYTES


async def test_where_nobody_can_hand_on_each_receives_for_itself(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_file, "_room", lambda home: 0)
    join(fleet, "actor-0", "far"), join(fleet, "actor-1", "far")
    with fleet.publisher(2) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        fleet.publish(publisher, 0)
        await until(lambda: all(s.verified == (7, 0) for s in fleet.subscribers), "both have it")
        await applied(fleet, publisher, 1)
        assert publisher.gauges()["sync/sent_bytes"] == 2 * BYTES
    assert "no room for 2.6e-07 GB" in caplog.text
    assert "each actor of node far receives for itself now" in caplog.text


async def test_an_actor_that_does_not_see_its_relay_s_folder_receives_for_itself(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers may share a network, and no files."""
    monkeypatch.setattr(node_file, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(node_file, "_checked", lambda name: name + "x" * (name in asked))
    asked: list[str] = []
    joins = NodeTransport.join

    def elsewhere(where: Rendezvous) -> NodeTransport:
        asked.append(where.prefix)
        return joins(where)

    monkeypatch.setattr(NodeTransport, "join", elsewhere)
    join(fleet, "actor-0", "far"), join(fleet, "actor-1", "far")
    with fleet.publisher(2) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        fleet.publish(publisher, 0)
        await until(lambda: all(s.verified == (7, 0) for s in fleet.subscribers), "both have it")
        assert len(asked) == 1 and publisher._error is None


def test_a_relay_s_file_is_read_by_others_and_goes(home: Path) -> None:
    relay = NodeFile(WHERE)
    reader = NodeTransport.join(msgspec.structs.replace(WHERE, prefix="abc"))
    kept = torch.zeros(8, dtype=torch.uint8)
    for value in (1, 2):
        relay.write([torch.full((8,), value, dtype=torch.uint8)])
        reader.broadcast([kept], 1.0)
        assert kept.tolist() == [value] * 8 and len(list(home.glob("abc/*"))) == 1
    assert home.stat().st_mode & 0o777 == (home / "abc").stat().st_mode & 0o777 == 0o700
    relay.clear()
    assert not list(home.glob("abc/*"))
    with pytest.raises(TransportFailed, match=r"3 did not appear within 0\.05 s"):
        reader.broadcast([kept], 0.05)
    relay.close()
    with pytest.raises(TransportFailed, match="the relay has left"):
        reader.broadcast([kept], 10.0)
    assert not list(home.iterdir())


def test_only_what_dead_relays_of_this_user_left_is_removed(home: Path) -> None:
    living = NodeFile(WHERE)
    (home / "dead").mkdir()
    (home / "dead" / "1").write_bytes(b"weights")
    remove_leftovers()
    assert [each.name for each in home.iterdir()] == ["abc"]
    living.close()


@pytest.mark.skipif(os.getuid() != 0, reason="another user's folder can be made by root alone")
def test_another_user_s_folder_is_left_alone_and_not_used(home: Path) -> None:
    home.mkdir()
    (home / "dead").mkdir()
    os.chown(home, 12345, 12345)
    remove_leftovers()
    assert (home / "dead").is_dir()
    with pytest.raises(RelayFailed, match="it belongs to another user"):
        NodeFile(WHERE)


def test_a_name_that_leads_elsewhere_is_refused(home: Path) -> None:
    with pytest.raises(RelayFailed, match="names no folder of a relay"):
        NodeFile(msgspec.structs.replace(WHERE, hand_on="../abc"))

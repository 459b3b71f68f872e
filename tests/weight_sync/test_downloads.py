"""Who joins late from another node downloads a version, and the others' group does not notice."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from configs.keys import Keys
from configs.load import ConfigError, parse
from configs.schema import WeightSyncConfig
from tests.faults.tcp_proxy import ChaosProxy, Faults
from tests.weight_sync.conftest import CONFIG, BareEngine, Fleet
from tests.weight_sync.test_relays import until
from weight_sync import downloads, subscriber
from weight_sync.protocol import Rendezvous, WeightSyncError
from weight_sync.publisher import Publisher
from weight_sync.routes import Lacking, lacking
from weight_sync.subscriber import Subscriber
from weight_sync.transports import download, node_file, snapshot_server
from weight_sync.transports.collective import GlooTransport
from weight_sync.transports.download import DownloadTransport

ROWS = 1 << 13
BYTES = 2 * 16 * ROWS
SLOW = Faults(delay_s=0.2)  # of each chunk: four of them a version


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "JOIN_AGAIN_S", 0.1)
    monkeypatch.setattr(downloads, "_LOOK_S", 0.05)
    monkeypatch.setattr(node_file, "BASES", (tmp_path,))


@pytest.fixture
def ports() -> list[int]:
    """Of the learner and of a proxy."""
    with ExitStack() as stack:
        free = [stack.enter_context(closing(socket.socket())) for _ in range(2)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in free]


@pytest.fixture
async def over_tcp(fleet: Fleet, ports: list[int], tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet whose learner listens on TCP, with an actor of its own node."""
    fleet.endpoint, fleet.keys = to(ports[0]), Keys(tmp_path / "keys").make()
    fleet.add("actor-0", rows=ROWS)
    yield fleet


@contextlib.asynccontextmanager
async def learner(fleet: Fleet, config: WeightSyncConfig = CONFIG) -> AsyncIterator[Publisher]:
    """A learner that waits for one actor; it leaves after all of them."""
    with fleet.publisher(1, config) as publisher:
        yield publisher
        await fleet.stop()


def join(fleet: Fleet, actor_id: str, node: str = "far", rows: int = ROWS) -> BareEngine:
    """Add an actor of another node."""
    engine = BareEngine(rows)
    built = Subscriber(actor_id, fleet.endpoint, engine, CONFIG, keys=fleet.keys, node=node)
    fleet.subscribers.append(built)
    fleet.tasks.append(asyncio.create_task(built.run()))
    return engine


async def applied(fleet: Fleet, publisher: Publisher, version: int) -> dict[str, torch.Tensor]:
    weights = fleet.publish(publisher, version, ROWS)
    await asyncio.to_thread(publisher.wait_applied, version, 30.0)
    assert fleet.subscribers[0].verified == (7, version)
    return weights


async def serves(fleet: Fleet, number: int, version: int) -> None:
    who = fleet.subscribers[number]
    await until(lambda: who.verified == (7, version) and who.serving.is_set(), f"it has {version}")


def holds(engine: BareEngine, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(engine.weights[name], weights[name]) for name in weights)


def to(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def arrived(engine: BareEngine) -> bool:
    reception = engine.receiver._reception
    return reception is not None and bool(reception.staging[0].any())


def proxied(monkeypatch: pytest.MonkeyPatch, proxy: ChaosProxy) -> list[int]:
    """Have downloads go through a proxy; the offsets that are asked for, as they are."""
    begun, asked, firsts = DownloadTransport.join, DownloadTransport._asked, []

    def elsewhere(where: Rendezvous) -> DownloadTransport:
        proxy._target = (where.store_host, where.store_port)
        port = int(proxy.listen.rpartition(":")[2])
        return begun(msgspec.structs.replace(where, store_port=port))

    def noting(transport: DownloadTransport, link: Any, first: int, size: int) -> Any:
        firsts.append(first)
        return asked(transport, link, first, size)

    monkeypatch.setattr(DownloadTransport, "join", elsewhere)
    monkeypatch.setattr(DownloadTransport, "_asked", noting)
    return firsts


async def test_who_comes_late_downloads_and_is_in_the_group_from_the_next_version_on(
    over_tcp: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast, ranks = GlooTransport.broadcast, []

    def noting(transport: GlooTransport, staging: list[torch.Tensor], seconds: float) -> None:
        ranks.append(transport.rendezvous.rank)
        broadcast(transport, staging, seconds)

    monkeypatch.setattr(GlooTransport, "broadcast", noting)
    async with learner(over_tcp) as publisher:
        weights = await applied(over_tcp, publisher, 0)
        before, carried = list(over_tcp.subscribers[0]._engine.calls), len(ranks)
        late = join(over_tcp, "actor-1")
        await serves(over_tcp, 1, 0)
        assert holds(late, weights) and len(ranks) == carried
        assert over_tcp.subscribers[0]._engine.calls == before
        await until(lambda: publisher.gauges()["sync/downloads"] == 1, "it is counted")
        assert publisher.gauges()["sync/downloaded_bytes"] == BYTES
        weights = await applied(over_tcp, publisher, 1)
        assert over_tcp.subscribers[1].verified == (7, 1) and holds(late, weights)
        assert sorted(ranks[carried:]) == [0, 1, 2] and late.calls.count("apply") == 2
        assert publisher.gauges()["sync/downloaded_bytes"] == BYTES


@pytest.mark.slow
async def test_of_a_node_one_downloads_and_hands_on_also_to_who_joins_meanwhile(
    over_tcp: Fleet, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(CONFIG, download_bytes_per_s=4e6)
    async with learner(over_tcp, config) as publisher:
        weights = await applied(over_tcp, publisher, 0)
        engines = [join(over_tcp, f"actor-{number}") for number in (1, 2)]
        engines.append(join(over_tcp, "actor-3", "third"))
        for number in (1, 2, 3):
            await serves(over_tcp, number, 0)
        assert all(holds(each, weights) for each in engines)
        await until(lambda: publisher.gauges()["sync/downloads"] == 3, "all are counted")
        assert publisher.gauges()["sync/downloaded_bytes"] == 2 * BYTES, "once a node"
        homes = tmp_path / f"forage-{os.getuid()}-weights"
        await until(lambda: not list(homes.glob("*/*")), "the file is removed")
        await applied(over_tcp, publisher, 1)
        assert {each.verified for each in over_tcp.subscribers} == {(7, 1)}


@pytest.mark.slow
async def test_a_link_that_breaks_is_taken_up_again_while_the_version_moves_on(
    over_tcp: Fleet, ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get three versions meanwhile; none of them waits for who comes late."""
    async with learner(over_tcp) as publisher:
        weights = await applied(over_tcp, publisher, 0)
        async with ChaosProxy(to(ports[1]), to(ports[1]), SLOW) as proxy:
            firsts = proxied(monkeypatch, proxy)
            late = join(over_tcp, "actor-1")
            await until(lambda: arrived(late), "its first bytes are there")
            proxy.faults = Faults(half_open=True)
            proxy.cut()
            await until(lambda: len(firsts) == 2, "it goes on")
            for version in (1, 2, 3):
                await applied(over_tcp, publisher, version)
            assert over_tcp.subscribers[1].verified is None, "it was not waited for"
            proxy.faults = Faults()
            await serves(over_tcp, 1, 0)
            await until(lambda: publisher.gauges()["sync/downloads"] == 1, "it is counted")
            assert holds(late, weights) and 0 == firsts[0] < firsts[1]
            assert late.calls.count("apply") == 1
            weights = await applied(over_tcp, publisher, 4)
    assert over_tcp.subscribers[1].verified == (7, 4) and holds(late, weights)


@pytest.mark.parametrize("always", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_corrupted_byte_is_refused_by_its_digest_and_never_loaded(
    over_tcp: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    always: bool,
) -> None:
    place, damaged = download._place, []

    def damages(views: list[memoryview], first: int, piece: bytes) -> None:
        if first == 0 and (always or not damaged):
            damaged.append(piece)
            piece = bytes([piece[0] ^ 1]) + piece[1:]
        place(views, first, piece)

    monkeypatch.setattr(download, "_place", damages)
    async with learner(over_tcp) as publisher:
        weights = await applied(over_tcp, publisher, 0)
        late = join(over_tcp, "actor-1")
        if always:
            with pytest.raises(WeightSyncError, match="refused: VerificationFailed: version 0"):
                await asyncio.wait_for(over_tcp.tasks[1], 30)
            assert len(damaged) == 3 and late.calls.count("apply") == 0
        else:
            await serves(over_tcp, 1, 0)
            assert holds(late, weights) and late.calls.count("apply") == 1
        said = "actor-1 failed to download: VerificationFailed: version 0: announced digest"
        assert said in caplog.text
        await applied(over_tcp, publisher, 1)


@pytest.mark.slow
async def test_a_wrong_key_is_refused_and_the_others_go_on(
    over_tcp: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(downloads, "_ATTEMPTS", 1)
    begun = DownloadTransport.join

    def forged(where: Rendezvous) -> DownloadTransport:
        return begun(msgspec.structs.replace(where, key="00" * 32))

    monkeypatch.setattr(DownloadTransport, "join", forged)
    async with learner(over_tcp) as publisher:
        await applied(over_tcp, publisher, 0)
        late = join(over_tcp, "actor-1")
        with pytest.raises(WeightSyncError, match="401 Unauthorized: the key is not this run's"):
            await asyncio.wait_for(over_tcp.tasks[1], 30)
        assert "refused a download by 127.0.0.1" in caplog.text and "apply" not in late.calls
        assert publisher.gauges()["sync/downloaded_bytes"] == 0
        await applied(over_tcp, publisher, 1)


@pytest.mark.slow
async def test_one_with_another_run_s_keys_is_told_of_no_download(
    over_tcp: Fleet, tmp_path: Path
) -> None:
    async with learner(over_tcp) as publisher:
        await applied(over_tcp, publisher, 0)
        own, over_tcp.keys = over_tcp.keys, Keys(tmp_path / "others").make()
        join(over_tcp, "actor-1")
        over_tcp.keys = own
        await asyncio.sleep(0.5)
        assert list(publisher._channel.joined) == ["actor-0"]
        assert over_tcp.subscribers[1].verified is None


@pytest.mark.slow
async def test_a_snapshot_that_is_gone_is_followed_by_the_newer_one(
    over_tcp: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = DownloadTransport.join

    def gone(where: Rendezvous) -> DownloadTransport:
        path = where.prefix if "410 Gone" in caplog.text else "/snapshots/0"
        return begun(msgspec.structs.replace(where, prefix=path))

    monkeypatch.setattr(DownloadTransport, "join", gone)
    async with learner(over_tcp) as publisher:
        await applied(over_tcp, publisher, 0)
        late = join(over_tcp, "actor-1")
        await until(lambda: "410 Gone" in caplog.text, "it is told")
        weights = await applied(over_tcp, publisher, 1)
        await until(lambda: holds(late, weights), "it has the newer one")


@pytest.mark.slow
async def test_who_leaves_on_the_way_is_forgotten_and_begins_anew(
    over_tcp: Fleet, monkeypatch: pytest.MonkeyPatch, ports: list[int]
) -> None:
    async with learner(over_tcp) as publisher:
        weights = await applied(over_tcp, publisher, 0)
        async with ChaosProxy(to(ports[1]), to(ports[1]), Faults(half_open=True)) as proxy:
            firsts = proxied(monkeypatch, proxy)
            join(over_tcp, "actor-1")
            await until(lambda: len(firsts) == 1, "it begins")
            over_tcp.tasks.pop().cancel()
            over_tcp.subscribers.pop()
            await until(lambda: list(publisher._channel.joined) == ["actor-0"], "it is missed")
            proxy.faults = Faults()
            late = join(over_tcp, "actor-1")
            await serves(over_tcp, 1, 0)
            assert holds(late, weights)


async def test_a_learner_that_dies_beside_a_download_is_followed_at_once(
    over_tcp: Fleet, monkeypatch: pytest.MonkeyPatch, ports: list[int]
) -> None:
    """The download by itself would hope for its old server for longer than is waited here."""
    async with ChaosProxy(to(ports[1]), to(ports[1]), Faults(half_open=True)) as proxy:
        firsts = proxied(monkeypatch, proxy)
        with over_tcp.publisher(1) as learner:
            await applied(over_tcp, learner, 0)
            late = join(over_tcp, "actor-1")
            await until(lambda: len(firsts) == 1, "it begins")
        with Publisher(CONFIG, 2, 8, over_tcp.endpoint, over_tcp.keys) as learner:
            weights = over_tcp.publish(learner, 0, ROWS)
            both = over_tcp.subscribers
            await until(lambda: {each.verified for each in both} == {(8, 0)}, "both follow it")
            await over_tcp.stop()
        assert holds(late, weights) and late.calls.count("apply") == 1


@pytest.mark.slow
async def test_where_the_disk_has_no_room_who_comes_late_gets_it_in_a_group(
    over_tcp: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_server, "SPARE_BYTES", 1 << 62)
    async with learner(over_tcp) as publisher:
        weights = await applied(over_tcp, publisher, 0)
        late = join(over_tcp, "actor-1")
        await serves(over_tcp, 1, 0)
        assert holds(late, weights) and publisher.gauges()["sync/downloads"] == 0
    assert "who joins late gets weights in a group from now on: no snapshot in" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "auto"])
async def test_nothing_is_downloaded_on_the_learner_s_node_nor_where_a_transport_is_named(
    over_tcp: Fleet, transport: str
) -> None:
    config = msgspec.structs.replace(CONFIG, transport=transport)
    async with learner(over_tcp, config) as publisher:
        await applied(over_tcp, publisher, 0)
        if transport == "auto":
            over_tcp.add("actor-1", rows=ROWS)
        else:
            join(over_tcp, "actor-1")
        await serves(over_tcp, 1, 0)
        assert publisher.gauges()["sync/downloads"] == 0


def test_who_comes_late_and_who_waits() -> None:
    has = {"a": 3, "b": 3, "c": -1, "d": -1, "e": 1}
    assert lacking(has, 3, {"b", "c", "e"}, {"e"}) == Lacking(("d",), ("c",))
    assert lacking(has, 4, {"b", "c", "e"}, {"e"}) == Lacking(("a", "b", "d", "e"), ("c",))
    assert lacking({"c": -1, "e": 1}, 3, {"c", "e"}, {"e"}) == Lacking(("e",), ("c",))
    assert lacking({"c": -1}, 0, {"c"}, ()) == Lacking(("c",), ()), "nobody serves"
    assert lacking({}, 0, (), ()) == Lacking((), ())


def test_a_rate_that_no_download_could_keep_its_deadline_at_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight_sync\.download_bytes_per_s"):
        parse("weight_sync: {download_bytes_per_s: 1000}", [], "test")

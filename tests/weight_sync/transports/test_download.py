"""A snapshot over HTTP: whole, by pieces of broken links, refused, withdrawn."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import pytest
import torch

from tests.faults.tcp_proxy import ChaosProxy, Faults
from weight_sync.protocol import Rendezvous, TransportFailed
from weight_sync.transports import snapshot_server
from weight_sync.transports.base import join
from weight_sync.transports.download import SCHEME, DownloadTransport, signature
from weight_sync.transports.snapshot_server import SnapshotServer

SIZES = (300_000, 64, 700_000)


def buckets(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in SIZES]


def empty() -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in SIZES]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SnapshotServer]:
    built = SnapshotServer("127.0.0.1", str(tmp_path), 1.0)
    yield built
    built.close()


def of(server: SnapshotServer, path: str, port: int = 0, **changes: object) -> DownloadTransport:
    where = Rendezvous(
        incarnation=7,
        epoch=-2,
        transport="http",
        store_host="127.0.0.1",
        store_port=port or server.port,
        prefix=path,
        rank=1,
        world_size=2,
        timeout_s=1.0,
        key=server.key,
    )
    transport = join(msgspec.structs.replace(where, **changes))
    assert isinstance(transport, DownloadTransport) and transport.form().place() == "cpu"
    return transport


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_snapshot_arrives_and_leaves_no_file(server: SnapshotServer, tmp_path: Path) -> None:
    kept = empty()
    of(server, server.offer(sent := buckets())).broadcast(kept, 10.0)
    assert same(kept, sent) and list(tmp_path.iterdir()) == []


async def test_a_link_that_breaks_is_taken_up_where_it_broke(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, firsts = DownloadTransport._asked, []

    def noting(transport: DownloadTransport, link: HTTPConnection, first: int, size: int) -> object:
        firsts.append(first)
        return asked(transport, link, first, size)

    monkeypatch.setattr(DownloadTransport, "_asked", noting)
    path, kept = server.offer(sent := buckets()), empty()
    listen = f"tcp://127.0.0.1:{free_port()}"
    target = f"tcp://127.0.0.1:{server.port}"
    async with ChaosProxy(listen, target, Faults(delay_s=0.01)) as proxy:
        transport = of(server, path, int(listen.rpartition(":")[2]))
        download = asyncio.create_task(asyncio.to_thread(transport.broadcast, kept, 20.0))
        for last in (100_000, 300_000):
            while not kept[0][min(last, SIZES[0]) - 1000 : min(last, SIZES[0])].any():
                await asyncio.sleep(0.001)
            proxy.cut()
            await asyncio.sleep(0.02)
        await download
    assert same(kept, sent) and len(firsts) == 3 and 0 == firsts[0] < firsts[1] < firsts[2]


def test_a_wrong_key_is_refused_by_name_and_not_tried_again(
    server: SnapshotServer, caplog: pytest.LogCaptureFixture
) -> None:
    path, kept = server.offer(buckets()), empty()
    for key in ("00" * 32, server.key[:-1] + ("0" if server.key[-1] != "0" else "1")):
        with pytest.raises(TransportFailed, match=rf"{path}: 401 Unauthorized: the key is not"):
            of(server, path, key=key).broadcast(kept, 10.0)
    assert not any(each.any() for each in kept) and server.sent_bytes == 0
    assert "refused a download by 127.0.0.1" in caplog.text


@pytest.mark.parametrize(
    ("method", "asked", "signed", "status"),
    [
        ("GET", {}, None, 401),
        ("GET", {}, 1, 401),
        ("POST", {}, 0, 405),
        ("GET", {"Range": "bytes=0-9"}, 0, 416),
        ("GET", {"Range": "bytes=5000000-"}, 5000000, 416),
        ("GET", {"Range": "furlongs=0-"}, 0, 416),
        ("GET", {"Range": "bytes=0-"}, 0, 206),
    ],
)
def test_what_is_asked_must_be_signed_and_sound(
    server: SnapshotServer, method: str, asked: dict[str, str], signed: int | None, status: int
) -> None:
    path = server.offer(buckets())
    if signed is not None:
        asked = asked | {"Authorization": f"{SCHEME} {signature(server.key, path, signed)}"}
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=5.0)) as link:
        link.request(method, path, headers=asked)
        assert link.getresponse().status == status


def test_what_has_been_withdrawn_is_gone(server: SnapshotServer) -> None:
    path = server.offer(buckets())
    newer = server.offer(sent := buckets(1))
    with pytest.raises(TransportFailed, match="410 Gone: the snapshot has been withdrawn"):
        of(server, path).broadcast(empty(), 10.0)
    of(server, newer).broadcast(kept := empty(), 10.0)
    assert same(kept, sent)


@pytest.mark.slow
def test_one_that_is_withdrawn_on_the_way_goes_on_to_the_end_of_its_connection(
    tmp_path: Path,
) -> None:
    slow = SnapshotServer("127.0.0.1", str(tmp_path), 5.0, bytes_per_s=10e6)
    sent = torch.full((2_000_000,), 7, dtype=torch.uint8)
    path, kept = slow.offer([sent]), torch.zeros_like(sent)
    download = threading.Thread(target=of(slow, path).broadcast, args=([kept], 10.0))
    download.start()
    while not kept[0]:
        time.sleep(0.001)
    slow.withdraw()
    download.join(10)
    slow.close()
    assert bool((kept == 7).all())


def test_a_snapshot_of_another_size_is_refused(server: SnapshotServer) -> None:
    path = server.offer(buckets())
    with pytest.raises(
        TransportFailed, match=r"holds 'bytes 0-1000063/1000064' where 'bytes 0-7/8'"
    ):
        of(server, path).broadcast([torch.zeros(8, dtype=torch.uint8)], 10.0)


@pytest.mark.slow
def test_so_many_are_served_at_once_and_others_wait(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = server.offer(sent := buckets()), empty()
    server._running = snapshot_server.AT_ONCE
    threading.Timer(0.15, setattr, (server, "_running", 0)).start()
    begun = time.monotonic()
    of(server, path, timeout_s=0.02).broadcast(kept, 10.0)
    assert time.monotonic() - begun > 0.1 and same(kept, sent)


def test_a_silent_learner_is_given_up_and_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        where = of_nobody(silent.getsockname()[1])
        begun = time.monotonic()
        with pytest.raises(TransportFailed, match=r"/x: 0 of 1000064 bytes, 0\.25 s: TimeoutError"):
            where.broadcast(empty(), 10.0)
        with pytest.raises(TransportFailed, match=r"0 of 1000064 bytes, 0\.1 s: "):
            where.broadcast(empty(), 0.1)
    assert time.monotonic() - begun < 2.0
    with pytest.raises(TransportFailed, match="ConnectionRefusedError"):
        where.broadcast(empty(), 0.1)


def of_nobody(port: int) -> DownloadTransport:
    where = Rendezvous(7, -2, "http", "127.0.0.1", port, "/x", 1, 2, 0.05, key="00" * 32)
    return DownloadTransport.join(where)


@pytest.mark.slow
def test_a_download_that_is_given_up_ends_at_once(tmp_path: Path) -> None:
    slow = SnapshotServer("127.0.0.1", str(tmp_path), 5.0, bytes_per_s=1e6)
    transport = of(slow, slow.offer([torch.ones(20_000_000, dtype=torch.uint8)]))
    failed: list[BaseException] = []

    def download() -> None:
        with pytest.raises(TransportFailed, match="it was given up") as error:
            transport.broadcast([torch.zeros(20_000_000, dtype=torch.uint8)], 60.0)
        failed.append(error.value)

    thread = threading.Thread(target=download)
    thread.start()
    while not slow.sent_bytes:
        time.sleep(0.001)
    transport.close()
    thread.join(5)
    begun = time.monotonic()
    slow.close()
    assert failed and time.monotonic() - begun < 2.0


@pytest.mark.slow
def test_a_rate_is_kept_by_all_together(tmp_path: Path) -> None:
    slow = SnapshotServer("127.0.0.1", str(tmp_path), 5.0, bytes_per_s=20e6)
    path, begun = slow.offer([torch.ones(4 << 20, dtype=torch.uint8)]), time.monotonic()
    both = [
        threading.Thread(
            target=of(slow, path).broadcast, args=([torch.zeros(4 << 20, dtype=torch.uint8)], 9.0)
        )
        for _ in range(2)
    ]
    for each in both:
        each.start()
    for each in both:
        each.join(9)
    assert 7 * (1 << 20) / 20e6 <= time.monotonic() - begun < 9.0
    slow.close()


@pytest.mark.slow
def test_who_does_not_read_on_is_given_up(tmp_path: Path) -> None:
    server = SnapshotServer("127.0.0.1", str(tmp_path), 0.2)
    path = server.offer([torch.ones(64 << 20, dtype=torch.uint8)])
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=5.0)) as link:
        head = {"Authorization": f"{SCHEME} {signature(server.key, path, 0)}"}
        link.request("GET", path, headers=head)
        answer = link.getresponse()
        begun = time.monotonic()
        while not server._running and time.monotonic() - begun < 5.0:
            time.sleep(0.001)
        while server._running and time.monotonic() - begun < 5.0:
            time.sleep(0.01)
        assert server.sent_bytes < 64 << 20 and not server._running and answer.status == 206
    server.close()


def test_an_address_that_is_not_this_host_s_and_a_disk_without_room_are_named(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(TransportFailed, match=r"cannot be served at 203\.0\.113\.9: "):
        SnapshotServer("203.0.113.9", str(tmp_path), 1.0)
    monkeypatch.setattr(snapshot_server, "SPARE_BYTES", 1 << 62)
    with pytest.raises(TransportFailed, match=rf"no snapshot in {tmp_path}: 0\.001 GB beside"):
        server.offer(buckets())

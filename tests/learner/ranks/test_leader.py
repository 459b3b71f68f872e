"""Ranks that lead, follow, refuse each other and die: real processes, and their links alone."""

import inspect
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from configs.keys import Address, Addresses, Keys
from configs.load import ConfigError
from configs.runtime.files import MOST_IDS
from configs.runtime.process import socket_dir
from configs.schema import Config
from learner.batch import build_shares
from learner.errors import BadBatch, BadModel, RankLost
from learner.ranks.connection import connect, host_and_port
from learner.ranks.leader import Leader, announce, follow, lead, make_call
from learner.ranks.link import CLOSE, Link
from learner.ranks.rendezvous import (
    Hello,
    Meeting,
    Rendezvous,
    admit_ranks,
    join_leader,
    settings_of,
)
from learner.ranks.shared_folder import Mark
from learner.ranks.shares import decode_share, encode_share
from learner.trainer import COLLECTIVES, Argument, Trainer
from replay.protocol import Batch
from tests.children import ends_with_us

PROGRAM = Path(__file__).with_name("one_led_rank.py")


@pytest.fixture
def two_ranks(config: Config) -> Iterator[Config]:
    learner = msgspec.structs.replace(
        config.learner, ranks=2, zero_stage=3, micro_batch_tokens=60, step_deadline_s=200.0
    )
    yield msgspec.structs.replace(config, learner=learner)
    shutil.rmtree(socket_dir(config.run_dir), ignore_errors=True)


def impatient(config: Config, step_deadline_s: float = 0.5) -> Config:
    learner = msgspec.structs.replace(config.learner, step_deadline_s=step_deadline_s)
    return msgspec.structs.replace(config, learner=learner)


@pytest.fixture
def two_processes(
    two_ranks: Config, batch: Callable[..., Batch], tmp_path: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that have made their steps and wait for the next call."""
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(two_ranks))
    for step in (1, 2):
        for rank, share in enumerate(
            build_shares(batch(step, step - 1), two_ranks.learner, vocabulary=MOST_IDS)
        ):
            (tmp_path / f"share-{step}.{rank}").write_bytes(encode_share(share))
    ranks = []
    for rank in (0, 1):
        with (tmp_path / f"errors-{rank}").open("wb") as errors:
            command = [sys.executable, str(PROGRAM), str(tmp_path), str(rank)]
            ranks.append(subprocess.Popen(command, stderr=errors, env=ends_with_us()))
    try:
        wait_for(tmp_path / "steps", ranks)
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def wait_for(path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 400
    while not path.exists():
        ended = [rank.poll() for rank in ranks]
        errors = [file.read_text()[-1500:] for file in sorted(path.parent.glob("errors-*"))]
        assert ended == [None, None] and time.monotonic() < deadline, errors
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_leader_trains_exports_restores_and_dismisses(
    two_processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    found = msgspec.json.decode((tmp_path / "steps").read_bytes())
    assert found["gauges"][0] == found["gauges"][1] and len(found["probe"]) == 2
    assert found["still"] == found["probe"]
    assert found["imitated"][0] == pytest.approx(found["measured"], rel=1e-5)
    assert found["imitated"][1] < found["imitated"][0]
    assert sorted(path.name for path in (tmp_path / "at-1" / "state").iterdir()) == [
        "rank-0.safetensors",
        "rank-1.safetensors",
    ]
    (tmp_path / "close").touch()
    assert [rank.wait(120) for rank in two_processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.soak("ranks"))])
def test_a_killed_rank_is_named_by_the_other(
    two_processes: list[subprocess.Popen[bytes]], tmp_path: Path, killed: int
) -> None:
    two_processes[killed].send_signal(signal.SIGKILL)
    assert two_processes[1 - killed].wait(120) != 0
    errors = (tmp_path / f"errors-{1 - killed}").read_text()
    assert f"rank {killed} of the learner is gone" in errors


class Recorder:
    """A trainer that notes its calls; `named_weights` is gone through like the real one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.gathered = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self.calls.append((name, given))
            return self.gather() if name == "named_weights" else None

        return call

    def gather(self) -> Iterator[int]:
        for self.gathered in (1, 2, 3):
            yield self.gathered


def test_every_collective_method_is_marked_and_led() -> None:
    public = {name for name, member in vars(Trainer).items() if inspect.isfunction(member)}
    assert set(COLLECTIVES) == {name for name in public if name[0] != "_"} - {"close"}
    assert all(name in vars(Leader) for name in COLLECTIVES)
    streams = {name for name in COLLECTIVES if inspect.isgeneratorfunction(getattr(Leader, name))}
    assert streams == {"named_weights"}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_call_is_made_by_the_other_side(
    name: str, links: tuple[Link, Link], two_ranks: Config, batch: Callable[..., Batch]
) -> None:
    shares = build_shares(batch(), two_ranks.learner, vocabulary=MOST_IDS)
    given: dict[Argument, tuple[Any, ...]] = {
        "shares": (shares,),
        "tokens": ([3, 14, 15],),
        "folder": (Path("at-1"),),
        "number": (0.25,),
        "none": (),
    }
    argument, rendezvous, other = COLLECTIVES[name], Rendezvous(print), Recorder()
    rendezvous.add(1, links[0])
    own = announce(rendezvous, name, given[argument])
    make_call(other, *links[1].receive(30.0))
    rendezvous.dismiss()
    ((made, received),) = other.calls
    assert made == name and other.gathered == (3 if name == "named_weights" else 0)
    if argument == "shares":
        assert own == (shares[:1],)
        received = (encode_share(received[0][0]),)
        assert received == (encode_share(shares[1]),)
    else:
        assert own == received == given[argument]


def test_a_call_that_no_rank_can_make_and_shares_for_others_are_refused() -> None:
    with pytest.raises(RankLost, match=r"rank 0 of the learner called 'fly', which no rank can do"):
        make_call(Recorder(), "fly", None)
    with pytest.raises(BadBatch, match=r"2 shares for learner.ranks = 1: build as many"):
        announce(Rendezvous(print), "learn", ([None, None],))


def test_ranks_that_do_not_come_are_named(two_ranks: Config) -> None:
    with pytest.raises(RankLost, match=r"ranks \[1\] of the learner have not joined within 0.5 s"):
        lead(impatient(two_ranks))
    with pytest.raises(RankLost, match=r"rank 0 of the learner has not been there for 0.5 s"):
        follow(impatient(two_ranks), 1)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_does_not_exist_is_refused(two_ranks: Config, rank: int) -> None:
    with pytest.raises(BadModel, match=rf"rank {rank}: learner.ranks = 2 allows 1 to 1"):
        follow(two_ranks, rank)


def test_a_rank_with_another_configuration_is_refused(two_ranks: Config) -> None:
    learner = msgspec.structs.replace(two_ranks.learner, lr=0.5)
    other = msgspec.structs.replace(two_ranks, learner=learner)
    meetings = [Rendezvous(print), Rendezvous(print)]
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(admit_ranks, two_ranks, meetings[0])
        words = (
            r"rank 1 .* on .* has another configuration: learner.lr = 0.5 there, 0.01 here; start"
        )
        with pytest.raises(RankLost, match=words):
            join_leader(other, 1, meetings[1])
        with pytest.raises(BadModel, match=words):
            leading.result()
    for rendezvous in meetings:
        rendezvous.close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@pytest.mark.parametrize("host", ["", "127.0.0.1", pytest.param("[::1]", marks=IPV6)])
def test_two_that_meet_share_a_store(two_ranks: Config, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"tcp://{host}:{free.getsockname()[1]}" if host else ""
    learner = msgspec.structs.replace(two_ranks.learner, rendezvous=place)
    config = msgspec.structs.replace(two_ranks, learner=learner)
    meetings = [Rendezvous(print), Rendezvous(print)]
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(admit_ranks, config, meetings[0])
        _, store, placement = join_leader(config, 1, meetings[1])
        led, first = leading.result()
        led.set("key", "value")
    assert store.get("key") == b"value"
    assert (first.local_rank, placement.local_rank, placement.hosts) == (0, 1, 1)
    assert not list(Path(config.run_dir).glob(".ranks-*")), "the mark is gone"
    assert listening() <= {"127.0.0.1", host.strip("[]")}
    for rendezvous in meetings:
        rendezvous.close()


@pytest.fixture
def over_tcp(two_ranks: Config) -> Config:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    learner = msgspec.structs.replace(two_ranks.learner, rendezvous=place, step_deadline_s=60.0)
    return msgspec.structs.replace(two_ranks, learner=learner)


def test_who_has_no_key_of_the_run_is_refused_and_keeps_nobody_out(
    over_tcp: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Keys(tmp_path / "others").make()
    stranger = msgspec.structs.replace(over_tcp, keys=str(tmp_path / "others"))
    meetings = [Rendezvous(print) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(admit_ranks, over_tcp, meetings[0])
        with pytest.raises(ConfigError, match=r"others': rank 0 .* refused this key: copy the"):
            join_leader(stranger, 1, meetings[1])
        host, _, port = over_tcp.learner.rendezvous.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))) as scan:
            scan.sendall(b"GET / HTTP/1.1\r\n")
        join_leader(over_tcp, 1, meetings[2])
        leading.result()
    assert "refused a rank's connection from 127.0.0.1: its key is not this run's" in caplog.text
    assert "refused a rank's connection from 127.0.0.1: it broke off the handshake" in caplog.text
    for rendezvous in meetings:
        rendezvous.close()


def test_who_listens_in_rank_0_s_place_is_found_out(over_tcp: Config, tmp_path: Path) -> None:
    Keys(Path(over_tcp.run_dir) / "keys").make()
    host, port = host_and_port(Addresses.of(over_tcp).rendezvous)
    with socket.create_server((host, port)) as listener, ThreadPoolExecutor() as pool:
        joining = pool.submit(join_leader, over_tcp, 1, Rendezvous(print))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"x" * 32)
            connection.recv(64)
            connection.sendall(b"y" * 32)
        with pytest.raises(ConfigError, match=r"who answers there did not know this key"):
            joining.result()


def test_a_rank_that_does_not_see_the_run_s_directory_is_named(over_tcp: Config) -> None:
    leader, address = Rendezvous(print), Addresses.of(over_tcp).rendezvous
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(admit_ranks, over_tcp, leader)
        connection = once_there(over_tcp, address)
        link = Link(connection, "rank 0")
        hello = Hello(1, settings_of(over_tcp), "another node", "node-7")
        link.send("join", msgspec.to_builtins(hello))
        meeting = msgspec.convert(link.receive(30.0)[1], Meeting)
        assert meeting.mark.seen() and not Mark(meeting.mark.path + "x", "").seen(0.0)
        link.send("sees", False)
        words = (
            r"is not seen by rank 1 of the learner on node-7 \(127.0.0.1\), which could not save "
            r"its part of a checkpoint: name a folder that all nodes share"
        )
        with pytest.raises(ConfigError, match=words):
            leading.result()
        with pytest.raises(RankLost, match=words):
            link.receive(30.0)
    leader.close()
    link.close()


def once_there(config: Config, address: Address) -> socket.socket:
    """A connection to rank 0, as soon as it listens."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return connect(config, address)
        except OSError:
            assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_that_do_not_come_and_who_came_instead_are_told(
    over_tcp: Config, tmp_path: Path
) -> None:
    Keys(tmp_path / "others").make()
    stranger = msgspec.structs.replace(over_tcp, keys=str(tmp_path / "others"))
    place = re.escape(over_tcp.learner.rendezvous)
    with pytest.raises(RankLost, match=rf"for 0.5 s: learner.rendezvous = '{place}' \(Connection"):
        join_leader(impatient(over_tcp), 1, Rendezvous(print))
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join_leader, stranger, 1, Rendezvous(print))
        words = r"ranks \[1\] .* within 3 s .*; refused 127.0.0.1: its key is not this run's"
        with pytest.raises(RankLost, match=words):
            admit_ranks(impatient(over_tcp, 3.0), Rendezvous(print))
        with pytest.raises(ConfigError, match=r"refused this key"):
            joining.result()


def test_a_rendezvous_on_the_loopback_is_told_to_who_waits(over_tcp: Config) -> None:
    words = r"ranks \[1\] of the learner have not joined within 0.5 s .* is the loopback here"
    with pytest.raises(RankLost, match=words):
        admit_ranks(impatient(over_tcp), Rendezvous(print))


def listening() -> set[str]:
    """The addresses on which this process listens for TCP."""
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    made = tuple(Link(end, "the peer") for end in socket.socketpair())
    yield made[0], made[1]
    for link in made:
        link.close()


def test_messages_keep_their_order(links: tuple[Link, Link]) -> None:
    for number in range(3):
        links[0].send("call", {"number": number, "blob": b"x" * 100_000})
    received = [links[1].receive(30.0) for _ in range(3)]
    assert [value["number"] for _, value in received] == [0, 1, 2]


def test_silence_has_a_deadline(links: tuple[Link, Link]) -> None:
    with pytest.raises(RankLost, match=r"the peer has said nothing for 0.01 s"):
        links[0].receive(0.01)


@pytest.mark.parametrize(("words", "news"), [("x is full", "failed: x is full"), (None, "is gone")])
def test_an_end_is_told_to_who_waits_and_to_who_watches(
    links: tuple[Link, Link], words: str | None, news: str
) -> None:
    heard: list[str] = []
    links[0].watch("rank 7", heard.append)
    if words is not None:
        links[1].send("failed", words)
    links[1].close()
    with pytest.raises(RankLost, match=f"rank 7 {news}"):
        links[0].receive(30.0)
    assert heard == [f"rank 7 {news}"] or wait_until(lambda: heard == [f"rank 7 {news}"])


def test_an_end_that_was_announced_is_no_news(links: tuple[Link, Link]) -> None:
    heard: list[str] = []
    links[0].watch("rank 7", heard.append)
    links[1].send(CLOSE)
    links[1].close()
    assert links[0].receive(30.0) == (CLOSE, None)
    with pytest.raises(RankLost, match="rank 7 is gone"):
        links[0].receive(30.0)
    links[0].close()  # its reader has ended
    assert heard == []


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_share_arrives_bit_for_bit(two_ranks: Config, batch: Callable[..., Batch]) -> None:
    share = build_shares(batch(), two_ranks.learner, vocabulary=MOST_IDS)[0]
    arrived = decode_share(encode_share(share))
    assert (arrived.step, arrived.temperature, arrived.gauges) == (
        share.step, share.temperature, share.gauges,
    )  # fmt: skip
    for one, other in zip(arrived.micro_batches, share.micro_batches, strict=True):
        for name in one.__slots__:
            assert torch.equal(getattr(one, name), getattr(other, name))

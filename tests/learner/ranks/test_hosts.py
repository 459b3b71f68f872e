"""Ranks on several hosts: network namespaces with addresses of their own, and nodes by name."""

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.keys import Keys
from configs.runtime.files import MOST_IDS
from configs.runtime.process import socket_dir
from configs.schema import Config
from learner.batch import build_shares
from learner.ranks.shares import encode_share
from replay.protocol import Batch
from tests.children import ends_with_us
from tests.faults.hosts import Host, hosts, supported

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(supported()), reason=f"no hosts: {supported()}"),
]
PROGRAM = Path(__file__).with_name("one_led_rank.py")
PORT = 4100


def configured(config: Config, ranks: int, **learner: Any) -> Config:
    given = {"zero_stage": 3, "micro_batch_tokens": 60, "step_deadline_s": 400.0} | learner
    replaced = msgspec.structs.replace(config.learner, ranks=ranks, **given)
    return msgspec.structs.replace(config, learner=replaced)


@contextmanager
def ranks_of(
    config: Config,
    batch: Callable[..., Batch],
    folder: Path,
    within: Sequence[Sequence[str]] | None = None,
    nodes: Sequence[str] = (),
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """The processes of all ranks, each run by the words of `within`, or on a node of `nodes`."""
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    for step in (1, 2):
        made = batch(step, step - 1, groups=3)
        for rank, share in enumerate(build_shares(made, config.learner, vocabulary=MOST_IDS)):
            (folder / f"share-{step}.{rank}").write_bytes(encode_share(share))
    ranks = []
    for rank in range(config.learner.ranks):
        words = [*(within[rank] if within else ()), sys.executable, str(PROGRAM), str(folder)]
        more = {"FORAGE_NODE": nodes[rank]} if nodes else {}
        with (folder / f"errors-{rank}").open("wb") as errors:
            started = subprocess.Popen([*words, str(rank)], stderr=errors, env=ends_with_us(**more))
            ranks.append(started)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        shutil.rmtree(socket_dir(config.run_dir), ignore_errors=True)


def findings(folder: Path, ranks: Sequence["subprocess.Popen[bytes]"]) -> dict[str, Any]:
    """What the ranks have found, once they have; fails where one has ended."""
    deadline = time.monotonic() + 800
    while not (folder / "steps").exists():
        errors = [path.read_text()[-1500:] for path in sorted(folder.glob("errors-*"))]
        assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline, errors
        time.sleep(0.1)
    return msgspec.json.decode((folder / "steps").read_bytes())


def inside(*where: Host) -> list[list[str]]:
    """The words that run a rank in each host."""
    return [["ip", "netns", "exec", host.name] for host in where]


def apart(config: Config, first: Host, **learner: Any) -> Config:
    """Two ranks that meet in the host of the first."""
    return configured(config, 2, rendezvous=f"tcp://{first.address}:{PORT}", **learner)


def test_two_hosts_learn_and_go_on_from_what_both_have_saved(
    config: Config, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    with hosts(2) as (one, two):
        assert socket.gethostname() in one.run("getent", "hosts", "127.0.1.1")  # of no use to two
        run = ranks_of(apart(config, one), batch, tmp_path / "two", inside(one, two))
        with run as ranks:
            found = findings(tmp_path / "two", ranks)
            (tmp_path / "two" / "close").touch()
            assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert found["gauges"][0] == found["gauges"][1]
    names = [path.name for path in (tmp_path / "two" / "at-1" / "state").iterdir()]
    assert sorted(names) == ["rank-0.safetensors", "rank-1.safetensors"]


@pytest.mark.soak("ranks")
def test_two_hosts_learn_bit_for_bit_what_one_does(
    config: Config, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    with ranks_of(configured(config, 2), batch, tmp_path / "one") as ranks:
        expected = findings(tmp_path / "one", ranks)
    with hosts(2) as (one, two):
        run = ranks_of(apart(config, one), batch, tmp_path / "two", inside(one, two))
        with run as ranks:
            assert findings(tmp_path / "two", ranks) == expected


@pytest.mark.soak("ranks")
def test_a_host_that_is_cut_off_is_named(
    config: Config, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    with hosts(2) as (one, two):
        run = ranks_of(apart(config, one), batch, tmp_path / "two", inside(one, two))
        with run as ranks:
            findings(tmp_path / "two", ranks)
            two.cut()
            begun = time.monotonic()
            assert [rank.wait(60) != 0 for rank in ranks] == [True, True]
            assert time.monotonic() - begun < 40.0
    said = [(tmp_path / "two" / f"errors-{rank}").read_text() for rank in (0, 1)]
    name = re.escape(socket.gethostname())
    assert re.search(rf"rank 1 of the learner on {name} \({two.address}\) is gone", said[0])
    assert f"rank 0 of the learner at tcp://{one.address}:{PORT} is gone" in said[1]


@pytest.mark.soak("ranks")
def test_a_run_directory_that_a_host_does_not_share_is_refused(
    config: Config, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    Keys(tmp_path / "keys").make()
    config = msgspec.structs.replace(config, keys=str(tmp_path / "keys"))
    Path(config.run_dir).mkdir()
    hide = f'mount -t tmpfs none "{config.run_dir}" && exec "$@"'
    lonely = ["unshare", "--mount", "--propagation=private", "sh", "-c", hide, "sh"]
    with hosts(2) as (one, two):
        words = inside(one, two)
        words[1] += lonely
        with ranks_of(apart(config, one), batch, tmp_path / "two", words) as ranks:
            assert [rank.wait(120) != 0 for rank in ranks] == [True, True]
    for rank in (0, 1):
        said = (tmp_path / "two" / f"errors-{rank}").read_text()
        assert "is not seen by rank 1 of the learner on" in said
        assert "name a folder that all nodes share" in said


@pytest.mark.soak("ranks")
def test_hosts_that_do_not_reach_each_other_are_named(
    config: Config, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    with hosts(3) as (one, two, three):
        two.run("ip", "route", "add", "unreachable", f"{three.address}/32")
        three.run("ip", "route", "add", "unreachable", f"{two.address}/32")
        place = f"tcp://{one.address}:{PORT}"
        star = configured(config, 3, rendezvous=place, step_deadline_s=60.0)
        run = ranks_of(star, batch, tmp_path / "three", inside(one, two, three))
        with run as ranks:
            assert [rank.wait(300) != 0 for rank in ranks] == [True, True, True]
    said = [(tmp_path / "three" / f"errors-{rank}").read_text() for rank in (0, 1, 2)]
    words = r"rank [12] of the learner, on .*, does not reach every other rank by its interface"
    assert all(re.search(words, each) for each in said), said


@pytest.mark.soak("ranks")
def test_copies_within_hosts_change_no_bit(
    config: Config, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    found = {}
    for copies in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        four = configured(config, 4, rendezvous=place, hierarchical=copies, anchor="ema")
        folder = tmp_path / str(copies)
        with ranks_of(four, batch, folder, nodes=("one", "one", "two", "two")) as ranks:
            found[copies] = findings(folder, ranks)
    assert found[True] == found[False]

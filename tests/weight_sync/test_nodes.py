"""Relays in processes of their own: killed as they hand on, and behind real network interfaces;
and actors that come late to a host of their own.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from tests.weight_sync.conftest import Fleet, Start
from tests.weight_sync.test_kills import wait_for_peers
from tests.weight_sync.test_relays import until
from weight_sync.publisher import Publisher
from weight_sync.transports import node_file

ROWS = 1 << 16
BYTES = 2 * 16 * ROWS
PATIENCE_S = 300.0  # for processes that start on a busy machine
HOME = Path("/dev/shm", f"forage-{os.getuid()}-weights")


async def serve(fleet: Fleet, publisher: Publisher, version: int, rows: int = ROWS) -> None:
    fleet.publish(publisher, version, rows)
    await asyncio.to_thread(publisher.wait_applied, version, 20.0)


def files(before: set[Path]) -> list[Path]:
    """What lies in relays' folders that are new."""
    return [file for folder in {*HOME.glob("*")} - before for file in folder.glob("*")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.soak("sync"))])
async def test_relays_that_are_killed_leave_nothing_and_the_others_are_served(
    fleet: Fleet, start: Start, kills: int
) -> None:
    """The learner goes on publishing; the killed actor comes back as another node-mate."""
    chance, version, before = random.Random(0), 0, {*HOME.glob("*")}
    with fleet.publisher(3) as publisher:
        living = {f"actor-{n}": start(f"actor-{n}", "far", ROWS) for n in range(3)}
        await asyncio.to_thread(publisher.wait_for_actors, PATIENCE_S)
        await serve(fleet, publisher, 0)
        assert publisher.gauges()["sync/sent_bytes"] == BYTES
        for kill in range(kills):
            version += 1
            fleet.publish(publisher, version, ROWS)
            await asyncio.sleep(chance.random() * 0.1)
            relay = living.pop(min(living))  # the first by name hands on
            os.kill(relay.pid, signal.SIGKILL)
            relay.wait()
            await serve(fleet, publisher, version := version + 1)
            name = f"actor-{kill + 3:02}"
            living[name] = start(name, "far", ROWS)
            await wait_for_peers(publisher, 3, PATIENCE_S)
            await serve(fleet, publisher, version := version + 1)
            assert publisher.gauges()["sync/sent_bytes"] == BYTES
        await until(lambda: not files(before), "the file goes once all have applied the version")
        assert len({*HOME.glob("*")} - before) == 1, "the folder of the relay that lives"
    for each in living.values():
        each.kill()
        each.wait()
    node_file.remove_leftovers()
    assert not {*HOME.glob("*")} - before


class Net:
    """Two network namespaces and this one on a bridge; `address` is ours."""

    def __init__(self) -> None:
        self.name = f"fr{os.getpid() % 100000}"
        self.address = "10.213.77.1"
        self._do(f"link add {self.name} type bridge")
        self._do(f"addr add {self.address}/24 dev {self.name}")
        self._do(f"link set {self.name} up")
        for number in (1, 2):
            space, veth = f"{self.name}n{number}", f"{self.name}v{number}"
            self._do(f"netns add {space}")
            self._do(f"link add {veth} type veth peer name eth0 netns {space}")
            self._do(f"link set {veth} master {self.name} up")
            inside = f"-n {space}"
            self._do(f"{inside} addr add 10.213.77.{number + 1}/24 dev eth0")
            self._do(f"{inside} link set eth0 up")
            self._do(f"{inside} link set lo up")

    def inside(self, number: int) -> list[str]:
        """What starts a command in a namespace."""
        return ["ip", "netns", "exec", f"{self.name}n{number}"]

    def alone(self, number: int, own: Path) -> list[str]:
        """The same, where this folder is all that it has of memory and for temporary files."""
        todo = []
        for needed in (REPOSITORY, Path(sys.prefix)):  # which may lie in /tmp themselves
            if needed.is_relative_to("/tmp"):
                (kept := own / needed.relative_to("/tmp")).mkdir(parents=True, exist_ok=True)
                todo.append(f"mount --bind {needed} {kept}")
        todo += [f"mount --rbind {own} {folder}" for folder in ("/dev/shm", "/tmp")]
        hide = " && ".join(todo)
        return [*self.inside(number), "unshare", "-m", "sh", "-c", f'{hide} && exec "$@"', "sh"]

    def slow(self, number: int, rate: str = "10gbit") -> None:
        """Let no more than this into a namespace."""
        shape = f"root tbf rate {rate} burst 64kb latency 200ms"
        words = ["tc", "qdisc", "replace", "dev", f"{self.name}v{number}", *shape.split()]
        subprocess.run(words, check=True)

    def sent(self, number: int) -> int:
        """Bytes that went into a namespace."""
        statistics = Path(f"/sys/class/net/{self.name}v{number}/statistics")
        return int((statistics / "tx_bytes").read_text())

    def close(self) -> None:
        """Remove all of it."""
        for number in (1, 2):
            subprocess.run(["ip", "netns", "del", f"{self.name}n{number}"], capture_output=True)
            # Which lives on with the processes inside, and its cable with it.
            subprocess.run(["ip", "link", "del", f"{self.name}v{number}"], capture_output=True)
        subprocess.run(["ip", "link", "del", self.name], capture_output=True)

    def _do(self, words: str) -> None:
        try:
            subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")


@pytest.fixture
def net() -> Iterator[Net]:
    built = Net()
    yield built
    built.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_version_crosses_the_network_once_a_node(
    fleet: Fleet, start: Start, net: Net
) -> None:
    """Counted by the interfaces: three actors on one node, one on another, one beside us."""
    fleet.endpoint = f"tcp://{net.address}:7713"
    with fleet.publisher(5) as publisher:
        fleet.add("actor-0", rows=ROWS)
        for number, node in enumerate((1, 1, 1, 2), start=1):
            start(f"actor-{number}", rows=ROWS, inside=net.inside(node))
        await asyncio.to_thread(publisher.wait_for_actors, PATIENCE_S)
        await serve(fleet, publisher, 0)
        before = [net.sent(number) for number in (1, 2)]
        for version in range(1, 6):
            await serve(fleet, publisher, version)
        assert publisher.gauges()["sync/sent_bytes"] == 2 * BYTES
        grown = [net.sent(number) - last for number, last in zip((1, 2), before, strict=True)]
        # To a tree of ranks: a node may also pass on what goes to the other one.
        assert min(grown) >= 5 * BYTES and sum(grown) < 10 * BYTES * 1.2, grown


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_who_comes_late_to_a_slow_host_without_shared_files_downloads_once(
    fleet: Fleet, start: Start, net: Net, tmp_path: Path
) -> None:
    """Two actors of one host; those who serve get their versions meanwhile, as fast as before."""
    fleet.endpoint = f"tcp://{net.address}:7714"
    net.slow(1, "2mbit")  # eight seconds a version
    with fleet.publisher(1) as publisher:
        first = fleet.add("actor-0", rows=ROWS)
        await asyncio.to_thread(publisher.wait_for_actors, PATIENCE_S)
        await serve(fleet, publisher, 0)
        before, version, longest_s = net.sent(1), 0, 0.0
        (own := tmp_path / "host").mkdir()
        for number in (1, 2):
            start(f"actor-{number}", rows=ROWS, inside=net.alone(1, own))
        await wait_for_peers(publisher, 2, PATIENCE_S)
        while net.sent(1) - before < BYTES / 2:  # none is for the group that it is to join
            begun = time.monotonic()
            await serve(fleet, publisher, version := version + 1)
            longest_s = max(longest_s, time.monotonic() - begun)
            await asyncio.sleep(0.1)
        await until(lambda: publisher.gauges()["sync/downloads"] == 2, "both have it", 120.0)
        gauges = publisher.gauges()
        print(f"{version} versions meanwhile, none took longer than {longest_s:.2f} s")
        assert version >= 3 and gauges["sync/refits"] == gauges["sync/refused"] == 0
        assert gauges["sync/downloaded_bytes"] == BYTES
        assert BYTES < net.sent(1) - before < 1.3 * BYTES, "it crossed the link once"
        assert first.calls.count("apply") >= version
        net.slow(1)
        await serve(fleet, publisher, version + 1)
        assert publisher.gauges()["sync/sent_bytes"] == BYTES, "and the next one in the group"

"""Hosts on one machine: what they are called, what is left of them, and Ray's view of them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.children import ends_with_us
from tests.faults import hosts as module
from tests.faults.hosts import (
    Host,
    HostError,
    capabilities,
    folder_of,
    hosts,
    interfaces_of,
    names_of,
    remove_left_behind,
    start_ray,
    supported,
    traffic_of,
)

needs_hosts = pytest.mark.skipif(bool(supported()), reason=f"no hosts: {supported()}")
STATUS = "Name:\tpython\nCapInh:\t0000000000000000\nCapEff:\t0000000000201000\nSeccomp:\t0\n"
CALL = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 0.2)
except ConnectionRefusedError:
    print("refused")
except TimeoutError:
    print("silent")
"""
MAKER = """
import sys, time
from tests.faults.hosts import hosts
with hosts(1) as (one,):
    one.start("sleep", "600", log=one.folder / "log")
    print(one.name, flush=True)
    time.sleep(600)
"""


def test_capabilities_are_the_effective_ones() -> None:
    assert [bit for bit in range(64) if capabilities(STATUS) >> bit & 1] == [12, 21]


def test_only_what_is_called_like_hosts_of_a_subnet_is_theirs() -> None:
    listed = ["fhost7-1", "fhost7-12", "fhost77-1", "fhost7-x", "fhost7", "other7-1"]
    assert names_of(7, listed) == ["fhost7-1", "fhost7-12"]
    links = ["lo", "eth0", "fhost7", "fhost7v1", "fhost77", "fhost77v1", "docker0"]
    assert interfaces_of(7, links) == ["fhost7", "fhost7v1"]


def test_names_of_interfaces_are_short_enough_for_the_kernel() -> None:
    assert max(len(f"{module.PREFIX}254v254"), len(module.INTERFACE)) < 15


def test_traffic_is_what_was_sent_and_received() -> None:
    listed = '[{"ifname":"eth0","stats64":{"rx":{"bytes":7,"packets":1},"tx":{"bytes":9}}}]'
    assert traffic_of(listed) == (9, 7)


def test_a_node_joins_its_head_and_the_head_nobody() -> None:
    one, two = (Host(7, number, Path("/tmp/fhost7"), {}) for number in (1, 2))
    assert "--head" in one.ray_command(one, 2) and "--head" not in two.ray_command(one, 2)
    assert "--address=10.77.7.1:6379" in two.ray_command(one, 2)


@needs_hosts
def test_hosts_reach_each_other_until_a_cable_is_out() -> None:
    with hosts(2) as (one, two):
        call = (sys.executable, "-S", "-c", CALL, two.address)
        assert one.run(*call) == "refused\n" and min(two.traffic()) > 0
        two.cut()
        assert one.run(*call) == "silent\n"
        assert one.run("getent", "hosts", two.name).split() == [two.address, two.name]
        two.mend()
        assert one.run(*call) == "refused\n"


@needs_hosts
def test_nothing_is_left_of_hosts_whose_test_failed() -> None:
    with pytest.raises(ZeroDivisionError), hosts(1) as (one,):
        sleeper = one.start("sleep", "600", log=one.folder / "log")
        assert one.pids() == [sleeper.pid]
        raise ZeroDivisionError
    assert sleeper.wait(10) == -signal.SIGKILL and not one.folder.parent.exists()
    assert one.name not in subprocess.check_output(["ip", "netns", "list"], text=True)
    assert not (module.FILES / one.name).exists()


@needs_hosts
def test_a_killed_makers_hosts_go_and_those_of_a_living_one_stay() -> None:
    with hosts(1) as (mine,):
        command = [sys.executable, "-c", MAKER]
        maker = subprocess.Popen(command, env=ends_with_us(), stdout=subprocess.PIPE, text=True)
        assert maker.stdout is not None
        name = maker.stdout.readline().strip()
        subnet = int(name.removeprefix(module.PREFIX).partition("-")[0])
        remove_left_behind(subnet)
        assert len(module.pids_inside(name)) == 1  # its maker lives
        maker.kill()
        maker.communicate()
        remove_left_behind(subnet)
        with pytest.raises(HostError, match=name):
            module.pids_inside(name)
        assert not folder_of(subnet).exists() and mine.folder.exists()


@needs_hosts
@pytest.mark.slow
def test_ray_places_on_both_hosts_and_notices_that_one_has_died(tmp_path: Path) -> None:
    with hosts(2) as (one, two):
        address = start_ray([one, two])
        out = tmp_path / "spread"
        spread = one.start(sys.executable, "-m", "tests.faults.spread", address, "2", log=out)
        wait_for(f"placed {one.address} {two.address}", out, spread, 40.0)
        two.die()
        assert two.pids() == []
        wait_for(f"lost {two.address}", out, spread, 20.0)
        assert spread.wait(20) == 0


def wait_for(words: str, out: Path, process: "subprocess.Popen[bytes]", deadline_s: float) -> None:
    """Wait until a process has printed these words."""
    end = time.monotonic() + deadline_s
    while words not in out.read_text(errors="replace"):
        if time.monotonic() > end or process.poll():
            pytest.fail(f"no {words!r} in:\n{out.read_text(errors='replace')}")
        time.sleep(0.1)

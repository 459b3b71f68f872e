"""The examination of a cluster's nodes: in this process, and over hosts on this machine."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from scripts.fleet import doctor as command
from scripts.fleet import examination
from scripts.fleet.examination import Examined, examined_by
from tests.faults.hosts import Host, hosts, start_ray, supported
from tests.scripts.fleet.test_survey import CHOSEN, There

SECONDS = 300.0


def doctor(host: Host, log: Path, *words: str, **environment: str) -> tuple[int, str]:
    """The exit code of `forage doctor` in a host, and what it said."""
    command = [sys.executable, "-m", "scripts.cli", "doctor", *words]
    process = host.start(*command, log=log, environment={"COLUMNS": "80", **environment})
    return process.wait(SECONDS), log.read_text()


def examiners(host: Host) -> list[bytes]:
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.pids()]
    return [line for line in lines if b"Examiner" in line or b"scripts" in line]


def found_where(monkeypatch: pytest.MonkeyPatch, **second: Any) -> Examined:
    """What is found on three nodes, of which the second is like this."""
    monkeypatch.setattr(examination, "RATE_S", 0.01)
    posts: list[Any] = [There("127.0.0.1"), There("127.0.0.2", **second), There("127.0.0.3")]
    try:
        return examined_by(posts, Config(run_dir="/tmp/none"))
    finally:
        for post in posts:
            post.end()


@pytest.mark.parametrize("dies_at", ["listen", "unreachable", "receive", "rate"])
def test_what_was_found_is_told_although_a_node_dies_later(
    dies_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_where(monkeypatch, dies_at=dies_at)
    assert found.seen.keys() == {"127.0.0.1", "127.0.0.2", "127.0.0.3"}
    assert [node.address for node in found.lost] == ["127.0.0.2"]
    assert found.unreachable == {} and found.rates[("127.0.0.3", "127.0.0.1")] > 0
    (row,) = command.lost(found.lost, found.seen)
    assert (row.what, row.has, row.problems) == ("127.0.0.2", "stopped answering", 1)
    assert row.remedy.startswith("the actor died: see that it is up")


def test_a_node_that_is_never_looked_at_is_told_beside_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = found_where(monkeypatch, dies_at="look")
    assert found.seen.keys() == {"127.0.0.1", "127.0.0.3"} and len(found.rates) == 2
    (row,) = command.lost(found.lost, found.seen)
    assert row.has == "cannot be looked at"


def test_ports_are_tried_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_where(monkeypatch, wall=CHOSEN)
    assert found.unreachable.keys() == {("127.0.0.2", f"127.0.0.{n}") for n in (1, 3)}
    assert all(len(whys) == 1 for whys in found.unreachable.values())
    assert found.rates.keys() == {("127.0.0.1", "127.0.0.2"), ("127.0.0.3", "127.0.0.1")}
    rows = list(command.reach(found.unreachable))
    assert "connect to ports above 32767 (weights, collectives) of 127.0.0.1: see" in rows[0].remedy
    found = found_where(monkeypatch, wall=range(65_536))
    assert all(len(whys) == 2 for whys in found.unreachable.values())
    assert "ports 20000 to 31999 and above 32767" in next(command.reach(found.unreachable)).remedy


@pytest.mark.soak("hosts")
@pytest.mark.skipif(bool(supported()), reason=f"no hosts: {supported()}")
def test_every_node_of_a_cluster_is_looked_at(tmp_path: Path) -> None:
    older, file = tmp_path / "older" / "transformers-4.0.0.dist-info", tmp_path / "findings.json"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    with hosts(2) as (one, two):
        path = f"{older.parent}:{two.environment['PYTHONPATH']}"
        two.environment = two.environment | {"PYTHONPATH": path}
        address = start_ray([one, two])
        words = ("--cluster", address, "--nodes", "2", "--shared", str(tmp_path))
        code, said = doctor(one, tmp_path / "log", *words, "--json", str(file))
        refused = doctor(one, tmp_path / "refused", "--cluster", address, RAY_AUTH_TOKEN="ab" * 32)
        assert examiners(one) == examiners(two) == []
    assert code == 1 and "Traceback" not in said
    assert max(map(len, said.splitlines())) <= 80
    found = {each["what"]: each for each in json.loads(file.read_text())}
    version = next(each for what, each in found.items() if what.endswith(": transformers"))
    assert version["what"].startswith(two.address) and version["has"] == "4.0.0"
    for what in ("TCP between nodes", "shared storage", "clocks"):
        assert found[what]["ok"]
    rates = [float(each["has"].split()[0]) for each in found.values() if "Gbit/s" in each["has"]]
    assert len(rates) == 2 and min(rates) > 0
    assert refused[0] == 2 and "refuses our token" in " ".join(refused[1].split())


@pytest.mark.soak("hosts")
@pytest.mark.skipif(bool(supported()), reason=f"no hosts: {supported()}")
def test_a_node_that_dies_meanwhile_is_a_line_beside_what_was_found(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "findings.json"
    with hosts(2) as (one, two):
        address = start_ray([one, two])
        words = ("doctor", "--cluster", address, "--nodes", "2", "--json", str(file))
        process = one.start(sys.executable, "-m", "scripts.cli", *words, log=log)
        end = time.monotonic() + SECONDS
        open_ports = ("ss", "-H", "-l", "-t", "-n", "sport >= :20000 and sport < :32000")
        while not two.run(*open_ports) and time.monotonic() < end:  # looked at, and now to be tried
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        two.die()
        code = process.wait(SECONDS)
    assert code == 1 and "Traceback" not in log.read_text()
    found = {each["what"].partition(" (")[0]: each for each in json.loads(file.read_text())}
    assert found[two.address]["has"] == "stopped answering"
    assert "checks" in found[one.address]["has"] and found["versions"]["ok"]


@pytest.mark.soak("hosts")
@pytest.mark.skipif(bool(supported()), reason=f"no hosts: {supported()}")
def test_a_firewall_that_closes_the_ports_of_groups_is_found(tmp_path: Path) -> None:
    file, chosen = tmp_path / "findings.json", "32768-65534"
    with hosts(2) as (one, two):
        address = start_ray([one, two])
        both = ("sport", chosen, "dport", chosen)  # Ray's own lie below
        one.run("ip", "rule", "add", "ipproto", "tcp", *both, "blackhole")
        words = ("--cluster", address, "--nodes", "2", "--json", str(file))
        code, said = doctor(one, tmp_path / "log", *words)
        pairs = {f"{a.address} to {b.address}: TCP" for a, b in ((one, two), (two, one))}
    assert code == 1 and "Traceback" not in said
    found = json.loads(file.read_text())
    bad = {each["what"]: each["remedy"] for each in found if not each["ok"]}
    assert bad.keys() >= pairs and not any("Gbit/s" in each["has"] for each in found)
    assert all("ports above 32767 (weights, collectives)" in bad[pair] for pair in pairs)

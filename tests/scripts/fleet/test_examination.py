"""The nodes of a real Ray cluster, over hosts on this machine."""

import json
import sys
from pathlib import Path

import pytest

from tests.faults.hosts import Host, hosts, start_ray, supported

SECONDS = 300.0


def doctor(host: Host, log: Path, *words: str, **environment: str) -> tuple[int, str]:
    """The exit code of `forage doctor` in a host, and what it said."""
    command = [sys.executable, "-m", "scripts.cli", "doctor", *words]
    process = host.start(*command, log=log, environment={"COLUMNS": "80", **environment})
    return process.wait(SECONDS), log.read_text()


def examiners(host: Host) -> list[bytes]:
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.pids()]
    return [line for line in lines if b"Examiner" in line or b"scripts" in line]


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
    assert found["TCP between nodes"]["ok"] and found["shared storage"]["ok"]
    assert sum(each["ok"] for what, each in found.items() if what.endswith(": clock")) == 2
    rates = [float(each["has"].split()[0]) for each in found.values() if "Gbit/s" in each["has"]]
    assert len(rates) == 2 and min(rates) > 0
    assert refused[0] == 2 and "refuses our token" in " ".join(refused[1].split())

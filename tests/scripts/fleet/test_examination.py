"""The nodes of a real Ray cluster, over hosts on this machine."""

import json
import sys
from pathlib import Path

import pytest

from tests.faults import hosts

SECONDS = 300.0


@pytest.mark.soak("hosts")
def test_every_node_of_a_cluster_is_looked_at(tmp_path: Path) -> None:
    if why := hosts.supported():
        pytest.skip(why)
    log, file = tmp_path / "log", tmp_path / "findings.json"
    with hosts.hosts(2) as made:
        one, two = made
        address = hosts.start_ray(made)
        command = [sys.executable, "-m", "scripts.cli", "doctor", "--cluster", address]
        process = one.start(*command, "--nodes", "2", "--json", str(file), log=log)
        assert process.wait(SECONDS) == 0, log.read_text()
    found = {each["what"]: each for each in json.loads(file.read_text())}
    assert found["versions"]["ok"] and found["TCP between nodes"]["ok"]
    shown = [each["what"] for each in found.values() if "cores" in each["has"]]
    assert [name.partition(" ")[0] for name in shown] == [one.address, two.address]
    rates = [each for each in found.values() if "Gbit/s" in each["has"]]
    assert len(rates) == 2 and all(float(each["has"].split()[0]) > 0 for each in rates)

"""The file that says how a run stands: at most once a second, gone at the end, never in the way."""

import os
import time
from pathlib import Path

import pytest

from replay.protocol import Status
from scripts.runs.waits_file import FILE_NAME, MOST_ACTORS, WaitsFile, read_snapshot

GAUGES = {"replay/ready_groups": 3.0, "replay/open_groups": 5.0}


def status(phase: str, actors: int = 1) -> Status:
    fleet = {f"actor-{n}": {"actor/capacity": 8.0, "actor/reward": 0.5} for n in range(actors)}
    return Status((), (), GAUGES, fleet, phase, "")


def test_it_is_replaced_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock = WaitsFile(tmp_path), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert read_snapshot(tmp_path) is None
    for clock[0], phase in ((100.0, "one"), (100.9, "two"), (101.1, "three")):
        file.tell(status(phase), {"actor-1": "starts since 3 s"})
        assert read_snapshot(tmp_path).phase == ("three" if phase == "three" else "one")  # type: ignore[union-attr]
    found = read_snapshot(tmp_path)
    assert found and (found.ready, found.open, found.actors) == (3.0, 5.0, 1)
    assert found.fleet == {"actor-0": {"actor/capacity": 8.0}} and "actor-1" in found.states
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_of_many_actors_it_names_some(tmp_path: Path) -> None:
    WaitsFile(tmp_path).tell(status("one", 1000), {})
    found = read_snapshot(tmp_path)
    assert found and len(found.fleet) == MOST_ACTORS and found.actors == 1000
    assert "actor-255" in found.fleet


def test_a_folder_that_is_gone_is_nothing_to_stop_for(tmp_path: Path) -> None:
    file = WaitsFile(tmp_path / "gone")
    file.tell(status("one"), {})
    file.remove()
    (tmp_path / FILE_NAME).write_text('{"at_s": "torn')
    assert read_snapshot(tmp_path) is None
    (tmp_path / FILE_NAME).unlink()
    os.mkfifo(tmp_path / FILE_NAME)
    assert read_snapshot(tmp_path) is None

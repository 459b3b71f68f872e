"""Hosts that are gone, and Ray as the launcher starts it."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from scripts.fleet import fleet, guardian
from scripts.fleet.fleet import Fleet, Member


def gone(error: type[Exception]) -> Any:
    def answer(*_: object) -> None:
        raise error("4 workers were killed: the node is low on memory")

    return answer


@pytest.mark.parametrize("error", [ray.exceptions.OutOfMemoryError, ray.exceptions.RaySystemError])
def test_a_host_that_ray_has_ended_is_a_killed_process(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_answer", gone(error))
    host: Any = SimpleNamespace(poll=None, ready_at=None, stopped=None)
    member = Member("replay", host, (1, 0.0, 0), tmp_path / "replay.log", [])
    assert member.poll() == -9
    assert (member.ready_at(), member.stopped(), member.host_lives()) == (None, [], False)


def test_ray_kills_no_host_for_what_its_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(guardian, "start", lambda *_: None)
    monkeypatch.delenv(fleet.MONITOR, raising=False)
    monkeypatch.setattr(fleet, "start_ray", lambda *_: seen.append(os.environ.get(fleet.MONITOR)))
    for name in (guardian.TOKEN, "SPT_NOENV", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "before")
    Fleet(tmp_path, tmp_path, {}).__enter__()
    assert seen == ["0"]

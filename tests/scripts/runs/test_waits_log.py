"""The file of what actors waited for: changes alone, bounded, read on past what is torn."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.protocol import Status, StepReport
from scripts.runs import waits_log
from scripts.runs.waits_log import AT_ONCE, BEAT_S, FILE_NAME, LAPSE_S, SamplesSince, WaitsLog

START = 1_000_000.0
WORKS = {
    "actor/rollouts_in_flight": 6.0, "actor/capacity": 8.0, "sync/policy_version": 1.0,
    "actor/running_requests": 4.0, "actor/queued_requests": 1.0, "actor/kv_use_max": 0.256,
    "actor/reward": 0.5,
}  # fmt: skip


def status(fleet: dict[str, dict[str, float]], published: float = -1.0, stop: str = "") -> Status:
    steps = (StepReport(1, {"sync/published": published}),) if published >= 0 else ()
    return Status(steps, (), {}, fleet, "", stop)


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[Any]]]:
    """tell(at, fleet, …): what is in the file once the launcher has looked then."""
    clock = [START]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    logs: list[WaitsLog] = []

    def told(at: float, *facts: Any, states: dict[str, str] | None = None, new: bool = False,
             end: bool = False, **others: Any) -> list[list[Any]]:  # fmt: skip
        clock[0] = START + at
        if new or not logs:
            logs.append(WaitsLog(tmp_path))
        if end:
            logs[-1].end()
        else:
            logs[-1].tell(status(*facts, **others), states or {})
        return lines(tmp_path)

    return told


def lines(run: Path) -> list[list[Any]]:
    """The lines that are read, without what they lack."""
    found = [(each.at_s - START, *each.values()) for each in SamplesSince(run).news()]
    return [[value for value in each if value is not None] for each in found]


def test_a_line_is_written_where_something_changes(tell: Callable[..., list[list[Any]]]) -> None:
    begun = [[0.0, ""], [0.0, "actor-0", 2, 0, 4, 1, 26]]
    assert tell(0, {"actor-0": WORKS}) == begun
    idle = WORKS | {"actor/running_requests": 0.0}
    assert tell(0.5, {"actor-0": idle}) == begun  # once a second
    assert tell(1, {"actor-0": WORKS | {"actor/reward": 0.7}}) == begun
    assert tell(2, {"actor-0": idle}) == [*begun, [2.0, "actor-0", 2, 0, 0, 1, 26]]
    begun = tell(3, {"actor-0": idle}, states={"actor-0": "restarts"})
    assert begun[-1] == [3.0, "actor-0"] == tell(4, {"actor-0": idle}, states={"actor-0": ""})[-1]
    assert tell(5, {"actor-0": idle})[-1] == [5.0, "actor-0", 2, 0, 0, 1, 26]
    assert tell(6, {}) == [*begun, [5.0, "actor-0", 2, 0, 0, 1, 26], [6.0, "actor-0"]]
    assert tell(6 + BEAT_S, {})[-1] == [6.0 + BEAT_S]  # nothing is new
    assert tell(18, {}, end=True)[-1] == [18.0, ""]


def test_what_an_actor_waits_for_is_told_by_number(tell: Callable[..., list[list[Any]]]) -> None:
    assert tell(0, {"actor-0": WORKS}, 2.0)[-1][2:4] == [2, 1]  # it is to take version 2
    assert tell(1, {"actor-0": WORKS})[-1][2:4] == [2, 1]
    newer = WORKS | {"sync/policy_version": 2.0}
    assert tell(2, {"actor-0": newer})[-1][2:4] == [2, 0]
    assert tell(3, {"actor-0": newer}, 2.0, "completed")[-1][2:4] == [0, 0]  # none is to come
    assert tell(4, {"actor-0": {"actor/capacity": float("nan")}})[-1] == [4.0, "actor-0", 0, 0]


def test_of_many_changes_at_once_those_come_first_that_were_told_longest_ago(
    tell: Callable[..., list[list[Any]]],
) -> None:
    names = [f"actor-{n}" for n in range(3 * AT_ONCE)]
    for at in range(6):  # each changes with every look
        found = tell(at, {name: WORKS | {"actor/queued_requests": at} for name in names})
    told = [each[1] for each in found[1:]]
    assert len(told) == 6 * AT_ONCE and told == [*names, *names]
    many = tell(7, {f"actor-{n}": WORKS for n in range(999)})
    assert len(many) == len(found) + AT_ONCE


def test_after_a_silence_everything_is_told_again(tell: Callable[..., list[list[Any]]]) -> None:
    assert len(tell(0, {"actor-0": WORKS})) == 2
    assert [each[0] for each in tell(LAPSE_S + 1, {"actor-0": WORKS})[2:]] == [21.0, 21.0]
    assert [each[1] for each in tell(22, {"actor-0": WORKS}, new=True)[4:]] == ["", "actor-0"]


def test_its_bytes_are_bounded(
    tell: Callable[..., list[list[Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_log, "MOST_BYTES", 400)
    for at in range(200):
        found = tell(at, {"actor-0": WORKS | {"actor/queued_requests": at}}, new=at in (99, 150))
    tell(201, {}, end=True)
    assert found[-1][1] == "" and 300 < (tmp_path / FILE_NAME).stat().st_size < 450
    assert len(found) < 20 and found == lines(tmp_path)


def test_it_is_read_on_past_what_is_none(
    tell: Callable[..., list[list[Any]]], tmp_path: Path
) -> None:
    tell(0, {"actor-0": WORKS})
    since = SamplesSince(tmp_path)
    assert len(since.news()) == 2 and since.news() == []
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write("{}\n[NaN]\n[-1]\n[1e300]\n[1086403.0]\n")
        file.write('[1, "a", -1]\n[1, "a", 1e99]\n\n[1000001.0, "acto')
    assert since.news() == []
    tell(2, {"actor-0": WORKS}, new=True)  # after the torn line
    assert [each.actor for each in since.news()] == ["", "actor-0"]


def test_what_could_not_be_written_is_told_anew(
    tell: Callable[..., list[list[Any]]], tmp_path: Path
) -> None:
    tell(0, {"actor-0": WORKS})
    (tmp_path / FILE_NAME).rename(tmp_path / "away")
    (tmp_path / FILE_NAME).mkdir()  # cannot be written
    tell(1, {"actor-0": WORKS | {"actor/queued_requests": 3.0}})
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / "away").rename(tmp_path / FILE_NAME)
    found = tell(2, {"actor-0": WORKS | {"actor/queued_requests": 3.0}})
    assert found[2:] == [[2.0, ""], [2.0, "actor-0", 2, 0, 4, 3, 26]]


def test_a_folder_that_is_gone_is_nothing_to_stop_for(tmp_path: Path) -> None:
    log = WaitsLog(tmp_path / "gone")
    log.tell(status({"actor-0": WORKS}), {})
    log.end()
    assert SamplesSince(tmp_path / "gone").news() == []

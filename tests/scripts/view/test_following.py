"""A log is followed record by record, whatever is done to its files meanwhile."""

import shutil
from collections.abc import Callable
from pathlib import Path

from replay.log.compaction import compact
from replay.log.event_log import read
from replay.log.records import Delivered
from replay.protocol import Committed
from scripts.view.following import Follower, Placed, payload_of
from tests.scripts.conftest import RecordedRun


def told(follower: Follower) -> list[Placed]:
    return list(follower.news())


def trained(run: RecordedRun, steps: int) -> RecordedRun:
    for step in range(steps):
        run.train(step)
        run.report(step + 1, {"actor/reward": 0.5})
    return run


def test_each_record_is_told_once_as_it_is_written(
    make_recorded_run: Callable[..., RecordedRun],
) -> None:
    run = make_recorded_run(segment_bytes=2000)
    follower = Follower(run.path / "events.log")
    found = told(follower)
    assert found and told(follower) == []
    for step in range(3):
        run.train(step)
        found += told(follower)
    assert [each.record for each in found] == list(read(follower.path))
    assert [each.number for each in found] == list(range(len(found)))
    assert follower.read == follower.size and found[-1].segment > 2 and not follower.damage


def test_a_record_under_way_is_told_once_it_is_whole(recorded_run: RecordedRun) -> None:
    log = trained(recorded_run, 1).path / "events.log"
    whole, records = log.read_bytes(), list(read(log))
    log.write_bytes(whole[:-3])
    follower = Follower(log)
    assert len(told(follower)) == len(records) - 1 and not follower.damage
    assert told(follower) == [] and "the file ends inside a record" in follower.torn
    log.write_bytes(whole)
    assert [each.record for each in told(follower)] == records[-1:] and not follower.torn


def test_damage_is_named_and_ends_it(recorded_run: RecordedRun) -> None:
    log = trained(recorded_run, 1).path / "events.log"
    content = bytearray(log.read_bytes())
    content[-300] ^= 1
    log.write_bytes(content)
    follower = Follower(log)
    before = len(told(follower))
    assert 0 < before < len(content) and "checksum does not agree" in follower.damage
    assert str(log) in follower.damage and told(follower) == []


def test_a_lost_segment_is_named(make_recorded_run: Callable[..., RecordedRun]) -> None:
    run = trained(make_recorded_run(segment_bytes=2000), 3)
    (run.path / "events.log.000001").unlink()
    follower = Follower(run.path / "events.log")
    assert told(follower) == [] and "events.log.000001: this segment" in follower.damage


def test_another_log_in_its_place_is_named(make_recorded_run: Callable[..., RecordedRun]) -> None:
    """Whether it has as many segments or fewer."""
    runs = [trained(make_recorded_run(segment_bytes=each), 3) for each in (2000, 2000, 10**6)]
    logs = [run.path / "events.log" for run in runs]
    for number in (1, 2):
        log = logs[0].with_name("moved") / "events.log"
        shutil.copytree(logs[0].parent, log.parent)
        follower = Follower(log)
        assert told(follower) and not follower.damage
        shutil.rmtree(log.parent)
        shutil.copytree(logs[number].parent, log.parent)
        assert told(follower) == [] and "another log" in follower.damage
        shutil.rmtree(log.parent)


def test_payloads_are_found_also_where_compaction_has_moved_them(
    make_recorded_run: Callable[..., RecordedRun],
) -> None:
    run = trained(make_recorded_run(segment_bytes=2000), 3)
    log = run.path / "events.log"
    follower = Follower(log)
    found = [each for each in told(follower) if isinstance(each.record, Delivered)]
    places = {each.number: (each.segment, each.offset) for each in found}
    for each in found:
        assert payload_of(log, each.number, each.segment, each.offset) == each.record.payload
    run.send("learner", Committed(run.incarnation, 2))
    run.log.close()
    assert any(change.payloads for change in compact(log))
    left = {n: each for n, each in enumerate(read(log)) if isinstance(each, Delivered)}
    gone = [number for number, each in left.items() if not each.payload]
    assert gone and len(gone) < len(left)
    for number, each in left.items():
        assert payload_of(log, number, *places[number]) == each.payload
    assert told(follower)[-1].number == number_of_last(log) and not follower.damage


def number_of_last(log: Path) -> int:
    return sum(1 for _ in read(log)) - 1

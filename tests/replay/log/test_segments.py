"""The log in segments: one history, whatever a crash leaves of it, and gaps that are named."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.log import segments
from replay.log.event_log import (
    EventLog,
    LogFull,
    read,
    read_past_damage,
    read_whole,
    refuse_writer,
)
from replay.log.format import HEADER, Damage, TornRecord
from replay.log.records import ActorLeft, Record, Stopped
from replay.log.tail import log_end
from replay.protocol import LogError
from tests.replay.crash import killed_everywhere

SMALL = 140  # bytes; every record below has about 75
RECORDS: list[Record] = [ActorLeft(float(i), f"actor-{i}", "goodbye") for i in range(9)]
FEW = RECORDS[:5]  # in three segments


def write(log: EventLog, records: list[Record]) -> None:
    for record in records:
        log.append([record])
        log.sync()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of nine records in five segments, two in each but the last."""
    with EventLog.create(tmp_path / "events.log", SMALL) as log:
        write(log, RECORDS)
    return log.path


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def segment(path: Path, number: int) -> Path:
    return segments.segment_path(path, number)


def test_the_first_segment_has_the_logs_name_and_the_others_a_number(path: Path) -> None:
    assert names(path) == ["events.log", *(f"events.log.00000{i}" for i in range(1, 5))]


def test_all_segments_are_one_history(path: Path) -> None:
    assert list(read(path)) == list(read_whole(path)) == list(read_past_damage(path)) == RECORDS
    assert log_end(path).records == 9
    with EventLog.open(path, SMALL) as log:
        write(log, RECORDS[:3])
    assert list(read(path)) == RECORDS + RECORDS[:3]
    assert names(path)[-1] == "events.log.000005"


def test_a_log_of_one_file_goes_on_in_segments(tmp_path: Path) -> None:
    with EventLog.create(tmp_path / "events.log") as log:
        write(log, RECORDS[:5])
    before = log.path.read_bytes()
    with EventLog.open(log.path, SMALL) as log:
        write(log, RECORDS[5:7])
    assert log.path.read_bytes() == before and list(read(log.path)) == RECORDS[:7]


def test_an_empty_newest_segment_is_no_loss(path: Path) -> None:
    os.close(segments.begin(path, 5, 9, log_end(path).segment.log))
    assert list(read(path)) == RECORDS
    with EventLog.open(path, SMALL) as log:
        write(log, RECORDS[:1])
    assert list(read(path)) == [*RECORDS, RECORDS[0]] and names(path)[-1] == "events.log.000005"


@pytest.mark.parametrize("number", [0, 2])
def test_a_missing_segment_is_named(path: Path, number: int) -> None:
    segment(path, number).unlink()
    words = rf"{segment(path, number).name}: this segment .* is missing, but events\.log\.000004"
    for act in (lambda p: list(read(p)), lambda p: list(read_past_damage(p)), log_end):
        with pytest.raises(LogError, match=words):
            act(path)
    with pytest.raises(LogError):
        EventLog.open(path)
    with pytest.raises(LogError, match="already exists"):
        EventLog.create(path)
    assert segments.exists(path)


def test_a_segment_of_another_log_is_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with EventLog.create(tmp_path / "other" / "events.log", SMALL) as log:
        write(log, RECORDS)
    segment(path, 2).write_bytes(segment(log.path, 2).read_bytes())
    words = r"events\.log\.000002: offset 0: this segment is of another log: put back a copy"
    for act in (lambda p: list(read(p)), log_end, EventLog.open):
        with pytest.raises(LogError, match=words):
            act(path)
    (damage,) = (found for found in read_past_damage(path) if isinstance(found, Damage))
    assert damage.path == segment(path, 2) and damage.cause == "this segment is of another log"


def test_segments_in_the_wrong_order_are_named(path: Path) -> None:
    one, two = segment(path, 1).read_bytes(), segment(path, 2).read_bytes()
    segment(path, 1).write_bytes(two)
    segment(path, 2).write_bytes(one)
    words = r"events\.log\.000001: offset 0: this is segment 2, and stands in the place of 1"
    with pytest.raises(LogError, match=words):
        list(read(path))
    found = list(read_past_damage(path))
    assert [record for record in found if not isinstance(record, Damage)] == [
        *RECORDS[:2], *RECORDS[4:6], *RECORDS[2:4], *RECORDS[6:],
    ]  # fmt: skip
    assert len(found) == 11


def test_records_that_are_missing_at_the_end_of_a_closed_segment_are_noticed(path: Path) -> None:
    whole = segment(path, 2).read_bytes()
    segment(path, 2).write_bytes(whole[: len(whole) - (len(whole) - HEADER.size) // 2])
    words = r"events\.log\.000003: offset 0: 6 records belong before this segment, there are 5"
    with pytest.raises(LogError, match=words):
        list(read(path))
    (damage,) = (found for found in read_past_damage(path) if isinstance(found, Damage))
    assert damage.path == segment(path, 3) and "6 records belong before" in damage.cause


@pytest.mark.parametrize("tail", [b"cut", bytes(40)])
def test_only_the_newest_segment_has_a_torn_end(path: Path, tail: bytes) -> None:
    closed, newest = segment(path, 1), segment(path, 4)
    with newest.open("ab") as file:
        file.write(tail)
    assert list(read_whole(path)) == RECORDS
    EventLog.open(path).close()
    assert newest.with_name(newest.name + ".torn").read_bytes() == tail
    assert list(read(path)) == RECORDS
    size = closed.stat().st_size
    with closed.open("ab") as file:
        file.write(tail)
    with pytest.raises(LogError, match=rf"events\.log\.000001: offset {size}: ") as raised:
        list(read_whole(path))
    assert not isinstance(raised.value, TornRecord)
    (damage,) = (found for found in read_past_damage(path) if isinstance(found, Damage))
    assert (damage.path, damage.start, damage.end) == (closed, size, size + len(tail))
    with pytest.raises(LogError, match=r"events\.log\.000001"):
        EventLog.open(path)


@pytest.mark.parametrize("at", [0, 9, 13, 25])
def test_behind_a_damaged_header_the_records_are_kept(path: Path, at: int) -> None:
    data = bytearray(segment(path, 2).read_bytes())
    data[at] ^= 1
    segment(path, 2).write_bytes(data)
    with pytest.raises(LogError, match=r"events\.log\.000002: offset 0: "):
        list(read(path))
    found = list(read_past_damage(path))
    assert [record for record in found if not isinstance(record, Damage)] == RECORDS
    (damage,) = (record for record in found if isinstance(record, Damage))
    assert (damage.path, damage.start, damage.end) == (segment(path, 2), 0, HEADER.size)


def test_behind_a_lost_header_the_records_are_kept(path: Path) -> None:
    segment(path, 2).write_bytes(segment(path, 2).read_bytes()[HEADER.size :])
    found = list(read_past_damage(path))
    assert [record for record in found if not isinstance(record, Damage)] == RECORDS
    assert len(found) == len(RECORDS) + 1


def test_one_writer_holds_all_segments(path: Path) -> None:
    with EventLog.open(path, SMALL) as log:
        write(log, RECORDS)
        for act in (EventLog.open, refuse_writer):
            with pytest.raises(LogError, match="another process writes it"):
                act(path)
    refuse_writer(path)


def test_a_writer_that_locked_a_file_which_was_replaced_looks_again(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    real = segments.lock

    def replaced(*given: object) -> None:
        real(*given)  # type: ignore[arg-type]
        if other.exists():
            other.rename(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "lock", replaced)
        fd = segments.locked(path)
    assert os.fstat(fd).st_ino == path.stat().st_ino
    os.close(fd)


def test_no_room_for_another_segment_is_no_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventLog.open(path, SMALL) as log:
        write(log, RECORDS[:1])
        log.append(RECORDS[1:2])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _full)
            with pytest.raises(LogFull, match=r"events\.log\.000004: offset \d+: cannot write"):
                log.sync()
        assert names(path)[-1] == "events.log.000004", "no draft is left"
        log.sync()
    assert list(read(path)) == RECORDS + RECORDS[:2]


def _full(_: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_a_kill_at_any_system_call_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    for number in killed_everywhere(lambda: _write_and_tell(tmp_path / "now" / "events.log")):
        path = tmp_path / "now" / "events.log"
        if number < 12 and not path.with_name("told").exists():
            path.unlink(missing_ok=True)  # killed while the log was made: nothing was told
            continue
        told = int(path.with_name("told").read_text() or 0)
        found = list(read_whole(path))
        assert found == FEW[: len(found)] and told <= len(found) <= told + 1
        with EventLog.open(path, SMALL) as log:
            write(log, FEW[len(found) :])
        assert list(read(path)) == FEW
        assert not list(path.parent.glob("*.draft"))
        for file in path.parent.iterdir():
            file.unlink()
    assert number > 30


def _write_and_tell(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with EventLog.create(path, SMALL) as log:
        for number, record in enumerate(FEW):
            path.with_name("told").write_text(str(number))
            write(log, [record])


def test_a_segment_is_on_the_disk_before_it_is_named_and_named_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with EventLog.create(tmp_path / "events.log", SMALL) as log:
        write(log, RECORDS[:2])
        for name in ("write", "fsync", "fdatasync", "rename"):
            monkeypatch.setattr(os, name, _telling(told, name, getattr(os, name)))
        write(log, RECORDS[2:3])
    draft, last = "events.log.000001.draft", "events.log.000001"
    folder = tmp_path.name
    assert told == [
        f"write {draft}", f"fsync {draft}", f"rename {draft}", f"fsync {folder}",
        f"write {last}", f"fdatasync {last}",
    ]  # fmt: skip


def _telling(told: list[str], name: str, real):  # type: ignore[no-untyped-def]
    def call(which: object, *more: object) -> object:
        where = Path(f"/proc/self/fd/{which}").readlink() if isinstance(which, int) else str(which)
        told.append(f"{name} {Path(where).name}")
        return real(which, *more)

    return call


def test_what_a_killed_writer_left_is_on_the_disk_before_another_segment_begins(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(os, "fsync", _telling(told, "fsync", os.fsync))
    EventLog.open(path, SMALL).close()
    assert told == ["fsync events.log.000004"]


def test_a_reader_of_a_log_that_grows_has_a_beginning_of_it(path: Path) -> None:
    reader: Iterator[Record] = read(path)
    first = [next(reader) for _ in range(3)]
    with EventLog.open(path, SMALL) as log:
        write(log, [Stopped(1.0, "x")] * 5)
    found = first + list(reader)
    assert found == list(read(path))[: len(found)] and len(found) >= 9

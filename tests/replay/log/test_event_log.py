"""The event log: append-only, whole or refused with file and offset."""

import os
import resource
import struct
import zlib
from pathlib import Path

import msgspec
import pytest

from replay.log.event_log import (
    SEGMENT_BYTES,
    End,
    EventLog,
    LogFull,
    read,
    read_whole,
    refuse_writer,
)
from replay.log.format import FRAME, HEADER, MAX_RECORD_BYTES, Segment, TornRecord
from replay.log.records import ActorLeft, Stopped
from replay.protocol import LogError

RECORDS = [ActorLeft(1.0, "actor-0", "goodbye"), Stopped(2.0, "completed"), Stopped(3.0, "é")]


def written(tmp_path: Path) -> Path:
    path = tmp_path / "events.log"
    with EventLog.create(path) as log:
        log.append(RECORDS)
    return path


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    assert list(read(written(tmp_path))) == RECORDS


def test_header_is_magic_version_and_place(tmp_path: Path) -> None:
    found = written(tmp_path).read_bytes()
    header = b"FORAGELG\x03\x00\x00\x00" + bytes(12) + found[24:40]
    header += zlib.crc32(header).to_bytes(4, "little")
    assert found[: HEADER.size] == header and found[24:40] != bytes(16)


def test_every_log_has_a_name_of_its_own(tmp_path: Path) -> None:
    found = set()
    for name in "abc":
        (tmp_path / name).mkdir()
        found.add(written(tmp_path / name).read_bytes()[24:40])
    assert len(found) == 3


def test_every_record_has_its_number_and_both_are_under_its_checksum(tmp_path: Path) -> None:
    path = written(tmp_path)
    with EventLog.open(path) as log:
        log.append(RECORDS[:1])
    data, at, numbers = path.read_bytes(), HEADER.size, []
    while at < len(data):
        length, checksum, number = FRAME.unpack_from(data, at)
        end = at + FRAME.size + length
        assert checksum == zlib.crc32(data[at + 8 : end])
        numbers.append(number)
        at = end
    assert numbers == [0, 1, 2, 3]


def test_sync_writes_all_that_is_collected_and_forces_it_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    forcing = os.fdatasync
    with EventLog.create(tmp_path / "events.log") as log:
        size = log.path.stat().st_size
        monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), forcing(fd)))
        log.append(RECORDS[:1])
        log.append(RECORDS[1:])
        assert log.path.stat().st_size == size
        log.sync()
        assert list(read(log.path)) == RECORDS and len(synced) == 1
        log.sync()
        assert len(synced) == 1  # nothing to force


def test_a_file_that_may_not_grow_is_cut_back_and_written_once_it_may(tmp_path: Path) -> None:
    path = written(tmp_path)
    size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog.open(path) as log:
        log.append([Stopped(4.0, "x" * 5000)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, limits[1]))
        try:
            with pytest.raises(LogFull, match=rf"offset {size}: cannot write 5\d+ bytes: File too"):
                log.sync()
            assert path.stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.append([Stopped(5.0, "later")])
        log.sync()
    assert list(read(path)) == [*RECORDS, Stopped(4.0, "x" * 5000), Stopped(5.0, "later")]


def test_reopened_log_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path)
    with EventLog.open(path) as log:
        log.append(RECORDS[:1])
    assert list(read(path)) == [*RECORDS, RECORDS[0]]


def test_appending_nothing_writes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    size = path.stat().st_size
    with EventLog.open(path) as log:
        log.append([])
    assert path.stat().st_size == size


def test_create_refuses_an_existing_log(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(LogError, match=r"already exists: choose another run_dir, or .*--resume"):
        EventLog.create(path)
    assert list(read(path)) == RECORDS


@pytest.mark.parametrize("begin", [EventLog.create, EventLog.open])
def test_a_log_has_one_writer(tmp_path: Path, begin) -> None:
    path = tmp_path / "events.log"
    if begin == EventLog.open:
        written(tmp_path)
    words = r"events\.log: another process writes it \(replay, or .*\): end it first"
    with begin(path) as log:
        log.append(RECORDS)
        log.sync()
        path.write_bytes(whole := path.read_bytes() + b"cut")
        for act in (EventLog.open, refuse_writer):
            with pytest.raises(LogError, match=words):
                act(path)
        assert path.read_bytes() == whole, "what its writer is about to finish is not cut off"
    refuse_writer(path)
    EventLog.open(path).close()


def test_missing_file_and_missing_directory_are_named(tmp_path: Path) -> None:
    for act in (EventLog.open, EventLog.create, lambda path: list(read(path))):
        with pytest.raises(LogError, match=r"none/events\.log"):
            act(tmp_path / "none" / "events.log")


@pytest.mark.parametrize("content", [b"", b"FORAGE", b"something else entirely"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.log"
    path.write_bytes(content)
    with pytest.raises(LogError, match="offset 0: not an event log: put the run's own back"):
        list(read(path))


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_format_version_is_refused_by_name(tmp_path: Path, version: int) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[8] = version
    path.write_bytes(data)
    for act in (EventLog.open, lambda path: list(read(path))):
        with pytest.raises(LogError, match=f"format version {version}, this program reads 3: an? "):
            act(path)


def second_offset(path: Path) -> int:
    (length,) = struct.unpack_from("<I", path.read_bytes(), HEADER.size)
    return HEADER.size + FRAME.size + length


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data, at: data[: at + 3], "ends inside a record's frame"),
        (lambda data, at: data[: at + 20], "ends inside a record of"),
        (
            lambda data, at: data[: at + 19] + b"\0" + data[at + 20 :],
            "checksum does not agree: put back a copy",
        ),
        (lambda data, at: data[:at] + b"\xff" * 4 + data[at + 4 :], "at most"),
    ],
)
def test_a_broken_record_is_named_by_file_and_offset(tmp_path: Path, spoil, words: str) -> None:
    path = written(tmp_path)
    at = second_offset(path)
    path.write_bytes(spoil(path.read_bytes(), at))
    records = read(path)
    assert next(records) == RECORDS[0]
    with pytest.raises(LogError, match=rf"events\.log: offset {at}: .*{words}") as raised:
        next(records)
    if not isinstance(raised.value, TornRecord):
        with pytest.raises(LogError, match=f"offset {at}"):
            EventLog.open(path)


@pytest.mark.parametrize("left", [3, 20])
def test_a_last_record_that_is_cut_short_is_set_aside(tmp_path: Path, left: int) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    at = second_offset(path)
    path.write_bytes(whole[: at + left])
    assert list(read_whole(path)) == RECORDS[:1]
    with EventLog.open(path) as log:
        log.append(RECORDS[1:])
    assert list(read(path)) == RECORDS
    assert (tmp_path / "events.log.torn").read_bytes() == whole[at : at + left]


def test_an_unknown_record_is_named_by_offset(tmp_path: Path) -> None:
    class Strange(msgspec.Struct, tag=True):
        now: float

    path = tmp_path / "events.log"
    with EventLog.create(path) as log:
        log.append([Strange(0.0)])  # type: ignore[list-item]
    with pytest.raises(LogError, match=rf"offset {HEADER.size}: .*Strange"):
        list(read(path))


def test_a_record_that_is_too_large_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    with EventLog.create(path) as log, pytest.raises(LogError, match=r"Stopped record .* at most"):
        log.append([RECORDS[0], Stopped(0.0, "x" * MAX_RECORD_BYTES)])
    assert list(read(path)) == []


def test_a_full_disk_is_named() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    path = Path("/dev/full")
    log = EventLog(path, os.open(path, os.O_WRONLY), SEGMENT_BYTES, End(Segment(path), 0, 0))
    log.append(RECORDS)
    with pytest.raises(LogError, match=r"/dev/full: offset 0: cannot write \d+ bytes: No space"):
        log.sync()
    log.close()

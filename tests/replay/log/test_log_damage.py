"""Damaged logs: nothing whole is cut off, nothing else is believed, and the rest is readable."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay.log.event_log import EventLog, read, read_past_damage, read_whole
from replay.log.format import FRAME, HEADER, Damage, TornRecord
from replay.log.records import ActorLeft, Leased, Record, Stopped
from replay.protocol import LogError

RECORDS: list[Record] = [
    ActorLeft(1.0, "actor-0", "goodbye"),
    Leased(2.0, "actor-1", 7, (0, 1, 2), (0, 0, 0)),
    Stopped(3.0, "type"),
    Leased(4.0, "actor-1", 8, (0,), (0,)),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with EventLog.create(tmp_path / "events.log") as log:
        log.append(RECORDS)
    return log.path


def starts(path: Path) -> list[int]:
    """Return where each record's frame begins."""
    data, at, found = path.read_bytes(), HEADER.size, []
    while at < len(data):
        found.append(at)
        at += FRAME.size + FRAME.unpack_from(data, at)[0]
    return found


def spoil(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)


def test_a_length_that_reaches_past_the_end_does_not_cut_history_off(path: Path) -> None:
    second, third = starts(path)[1:3]
    spoil(path, second, FRAME.pack(9999, 0, 0)[:4])
    before = path.read_bytes()
    words = f"offset {second}: the file ends inside a record of 9999: put back a copy"
    for act in (EventLog.open, lambda p: list(read(p)), lambda p: list(read_whole(p))):
        with pytest.raises(LogError, match=words) as raised:
            act(path)
        assert not isinstance(raised.value, TornRecord)
    assert path.read_bytes() == before
    damage = Damage(path, second, third, "the file ends inside a record of 9999")
    assert list(read_past_damage(path)) == [RECORDS[0], damage, *RECORDS[2:]]


def test_each_stretch_that_cannot_be_read_is_told_in_its_place(path: Path) -> None:
    at = starts(path)
    spoil(path, at[0] + FRAME.size + 3, b"\x00")
    spoil(path, at[2] + 2, b"\xff\xff")
    found = list(read_past_damage(path))
    assert [f for f in found if not isinstance(f, Damage)] == [RECORDS[1], RECORDS[3]]
    damaged = [(f.start, f.end) for f in found if isinstance(f, Damage)]
    assert damaged == [(at[0], at[1]), (at[2], at[3])]


def test_zeros_at_the_end_are_a_write_that_was_never_acknowledged(path: Path) -> None:
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100))
    assert list(read_whole(path)) == RECORDS
    EventLog.open(path).close()
    assert path.stat().st_size == size and list(read(path)) == RECORDS
    assert (path.parent / "events.log.torn").read_bytes() == bytes(100)


def test_zeros_between_records_are_damage(path: Path) -> None:
    second, third = starts(path)[1:3]
    spoil(path, second, bytes(third - second))
    with pytest.raises(LogError, match=f"offset {second}: an empty record: put back a copy"):
        EventLog.open(path)
    assert len(list(read_past_damage(path))) == 4


def frames(path: Path) -> list[bytes]:
    """Return the bytes of each record, frame and all, with the header first."""
    data, at = path.read_bytes(), [0, *starts(path), path.stat().st_size]
    return [data[a:b] for a, b in pairwise(at)]


ORDERS = {  # of four records: what is there, and what is said of it
    "one removed": ((0, 2, 3), "record 1 is missing"),
    "two removed": ((0, 3), "records 1 to 2 are missing"),
    "the first removed": ((1, 2, 3), "record 0 is missing"),
    "one doubled": ((0, 1, 1, 2, 3), "record 1 stands behind record 1: twice, or out"),
    "two swapped": ((0, 2, 1, 3), "record 1 is missing"),
    "the last moved": ((3, 0, 1, 2), "records 0 to 2 are missing"),
}


@pytest.mark.parametrize("how", ORDERS)
def test_whole_records_removed_doubled_or_swapped_are_refused_by_name(path: Path, how: str) -> None:
    order, words = ORDERS[how]
    header, *records = frames(path)
    path.write_bytes(before := header + b"".join(records[n] for n in order))
    for act in (EventLog.open, lambda p: list(read(p)), lambda p: list(read_whole(p))):
        with pytest.raises(LogError, match=rf"offset \d+: {words}.*put back a copy"):
            act(path)
    assert path.read_bytes() == before
    found = list(read_past_damage(path))
    assert [f for f in found if not isinstance(f, Damage)] == [RECORDS[n] for n in order]
    assert words in next(f.cause for f in found if isinstance(f, Damage))


def test_two_swapped_records_are_told_once_each(path: Path) -> None:
    header, *records = frames(path)
    path.write_bytes(header + b"".join(records[n] for n in (0, 2, 1, 3)))
    causes = [f.cause for f in read_past_damage(path) if isinstance(f, Damage)]
    assert [cause.partition(":")[0] for cause in causes] == [
        "record 1 is missing", "record 1 stands behind record 2",
    ]  # fmt: skip


def test_a_record_of_another_number_is_not_believed(path: Path) -> None:
    at = starts(path)[1]
    spoil(path, at + FRAME.size - 8, (7).to_bytes(8, "little"))
    with pytest.raises(LogError, match="checksum does not agree"):
        list(read(path))


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "zero"]),
        st.integers(0, 10**6),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHANGES)
def test_no_change_crashes_a_reader_or_makes_up_a_record(
    path: Path, changes: list[tuple[str, int, bytes]]
) -> None:
    data = bytearray(path.read_bytes())
    for how, where, new in changes:
        at = where % (len(data) + 1)
        if how == "flip":
            data[at : at + len(new)] = bytes(b ^ 0x55 for b in data[at : at + len(new)])
        elif how == "cut":
            del data[at : at + len(new)]
        elif how == "insert":
            data[at:at] = new
        else:
            data[at : at + len(new)] = bytes(len(data[at : at + len(new)]))
    other = path.with_name("mutated.log")
    other.write_bytes(data)
    try:
        found = list(read_past_damage(other))
    except LogError:
        found = []
    kept = [record for record in found if not isinstance(record, Damage)]
    assert all(record in RECORDS for record in kept)
    try:
        before = list(read_whole(other))
        assert before == RECORDS[: len(before)]
        EventLog.open(other).close()
        assert list(read(other)) == before, "what was whole is whole still"
    except LogError:
        assert other.read_bytes() == bytes(data), "what is refused is left alone"

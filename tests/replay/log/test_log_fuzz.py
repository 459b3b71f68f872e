"""Logs that were changed on the disk: nothing changed is believed, and all that is whole is kept.

A log of five segments is mutated 10,000 times: bits flipped, ends cut off, stretches doubled, taken
out, exchanged (within a segment and between two), lengths and headers changed, segments exchanged,
emptied or taken away. A record is whole where its frame, checksum included, stands in the bytes:
`read_past_damage` finds each of these, and nothing else.
"""

import random
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from replay.log.event_log import EventLog, read, read_past_damage, read_whole
from replay.log.format import (
    FRAME,
    HEADER,
    MAX_RECORD_BYTES,
    Damage,
    OtherFormat,
    TornRecord,
    framed,
)
from replay.log.records import (
    ActorLeft,
    Compacted,
    Delivered,
    Leased,
    Record,
    Reported,
    Sampled,
    Stopped,
)
from replay.log.segments import segment_path
from replay.log.summary import Summary
from replay.protocol import LogError
from tests.replay.mutations import Files, mutated

LOGS = 10_000
SEGMENTS = 5


def records(rng: random.Random) -> list[Record]:
    """Thirty records, all different."""
    found: list[Record] = []
    for i in range(6):
        summary = Summary(i, 0, f"q-{i}", "train", 1.0, 1, 0, 2, 9, 0, i)
        found += [
            ActorLeft(float(i), f"actor-{i}", "goodbye"),
            Leased(float(i), "actor-0", i, (0, 1, 2), (0, 0, 1), "node"),
            Delivered(float(i), "actor-0", i, 0, rng.randbytes(120), summary),
            Delivered(float(i), "actor-0", i, 1, b"", summary, Compacted(7, i)),
            Sampled(float(i), 1, i, (i, i + 1), (), {"replay/open_groups": float(i)}),
        ]
    return [*found, Reported(9.0, 1, 1, {"learner/loss": 0.25}), Stopped(9.0, "completed")]


def cause_of(text: str) -> str:
    """A message without its place and its numbers."""
    return re.sub(r"\d+", "N", re.sub(r"^\S+: (offset \d+: )?", "", text)).partition(":")[0]


class Judge:
    """Reads a log and says what came of it. `causes` counts every rejection."""

    def __init__(self, path: Path, written: list[Record]) -> None:
        self.path, self.written = path, written
        encode = msgspec.msgpack.Encoder().encode
        self.frames = [framed(encode(record), n) for n, record in enumerate(written)]
        self.causes: Counter[str] = Counter()
        self.accepted = self.kept = 0

    def put(self, files: Files) -> None:
        for file in self.path.parent.iterdir():
            file.unlink()
        for number, data in files.items():
            segment_path(self.path, number).write_bytes(data)

    def read_past_damage(self, files: Files) -> None:
        found: Counter[int] = Counter()
        refused, damaged = "", 0
        try:
            for record in read_past_damage(self.path):
                if isinstance(record, Damage):
                    damaged += 1
                    self.causes[cause_of(record.cause)] += 1
                    assert 0 <= record.start <= record.end
                else:
                    found[self.number(record)] += 1
        except TornRecord as torn:
            self.causes["torn: " + cause_of(str(torn))] += 1
        except LogError as error:
            refused = cause_of(str(error))
            self.causes["refused: " + refused] += 1
        whole = Counter(
            {
                number: count
                for number, frame in enumerate(self.frames)
                if (count := sum(data.count(frame) for data in files.values()))
            }
        )
        assert refused or found == whole, "what is whole is read, and nothing else"
        assert not found - whole
        self.kept += found.total()

    def number(self, record: Record) -> int:
        """Which of the written ones it is; a ValueError: none of them."""
        return self.written.index(record)

    def read_strictly(self, files: Files) -> list[Record]:
        """The records in front of the first rejection; they are all among those written."""
        found: list[Record] = []
        try:
            for record in read_whole(self.path):
                self.number(record)
                found.append(record)
        except LogError:
            return found
        self.accepted += 1
        return found

    def open(self, files: Files, before: list[Record]) -> None:
        """A refused log is left alone; any other has lost nothing that was whole."""
        try:
            EventLog.open(self.path).close()
        except LogError:
            for number, data in files.items():
                assert segment_path(self.path, number).read_bytes() == data
            return
        assert list(read(self.path)) == before


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return Judge(tmp_path / "log" / "events.log", records(random.Random(0)))


@pytest.fixture
def files(judge: Judge) -> Files:
    judge.path.parent.mkdir()
    with EventLog.create(judge.path, 1100) as log:
        for record in judge.written:
            log.append([record])
            log.sync()
    found = {n: segment_path(judge.path, n).read_bytes() for n in range(SEGMENTS)}
    assert not segment_path(judge.path, SEGMENTS).exists()
    assert len(set(judge.frames)) == len(judge.frames)
    return found


def check(judge: Judge, files: Files, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(count):
        other = mutated(files, rng)
        if other == files:
            continue
        judge.put(other)
        judge.read_past_damage(other)
        before = judge.read_strictly(other)
        if number % 10 == 0:
            judge.open(other, before)


KNOWN = {
    "an empty record",
    "a record of N bytes",
    "the file ends inside a record's frame",
    "the file ends inside a record of N",
    "the record's checksum does not agree",
    "not an event log",
    "the header's checksum does not agree",
    "this is segment N, and stands in the place of N",
    "N records belong before this segment, there are N",
    "record N is missing",
    "records N to N are missing",
    "record N stands behind record N",
    "torn: the file ends inside a record's frame",
    "torn: the file ends inside a record of N",
    "refused: not an event log",
    "refused: this segment of the event log is missing, but events.log.N is there",
}
RARE = {
    "format version N, this program reads N",
    "refused: format version N, this program reads N",
    "torn: an empty record",
    "refused: the header's checksum does not agree",
    "refused: this is segment N, and stands in the place of N",
}


def test_some_mutated_logs(judge: Judge, files: Files) -> None:
    check(judge, files, 300, seed=1)
    assert not judge.causes.keys() - KNOWN - RARE and judge.kept > 300


@pytest.mark.slow
@pytest.mark.soak("examples")
@pytest.mark.timeout(900)
def test_no_mutated_log_is_believed(judge: Judge, files: Files) -> None:
    tracemalloc.start()
    check(judge, files, LOGS, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert KNOWN <= judge.causes.keys() <= KNOWN | RARE, judge.causes
    assert judge.accepted < 0.15 * LOGS, "only what was cut or moved between whole records"
    assert peak < MAX_RECORD_BYTES // 4


@pytest.mark.parametrize("length", [MAX_RECORD_BYTES, MAX_RECORD_BYTES + 1, (1 << 32) - 1])
def test_a_corrupted_length_takes_no_more_than_a_record_may(tmp_path: Path, length: int) -> None:
    path = tmp_path / "events.log"
    with EventLog.create(path) as log:
        log.append([Stopped(1.0, "before")])
    with path.open("ab") as file:
        file.write(FRAME.pack(length, 1, 1))
        file.truncate(HEADER.size + 200 + (5 * MAX_RECORD_BYTES) // 2)
    with path.open("ab") as file:
        file.write(framed(msgspec.msgpack.encode(Stopped(2.0, "behind")), 2))
    tracemalloc.start()
    before, damage, behind = read_past_damage(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (before, behind) == (Stopped(1.0, "before"), Stopped(2.0, "behind"))
    assert isinstance(damage, Damage) and peak < MAX_RECORD_BYTES + (16 << 20)


def test_another_format_is_refused_before_anything_is_read(judge: Judge, files: Files) -> None:
    judge.put(files | {0: files[0][:8] + b"\x07" + files[0][9:]})
    with pytest.raises(OtherFormat, match="format version 7"):
        list(read_past_damage(judge.path))

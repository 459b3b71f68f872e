"""The bytes of one segment of an event log, and where damage in them ends.

Header: magic `FORAGELG`, u32 format version, u32 number of the segment, u64 count of the records in
the segments before it, 16 random bytes that name the log in all of its segments, u32 crc32 of all
that. Then per record: u32 length of the payload, u32 crc32 of what follows, u64 number of the
record in the log (from 0), payload (one record of `replay.log.records` in msgpack). Integers are
little-endian.

A record's number says where it belongs, so that whole records taken out, doubled or put elsewhere
are damage as well.

A writer that is killed leaves a last frame of the newest segment cut short, and nothing behind it:
the same bytes with a whole record behind them, or in a closed segment, are damage, and history that
must not be cut off.
"""

import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from replay.protocol import LogError

FORMAT_VERSION = 3
MAGIC = b"FORAGELG"
LOG_ID_BYTES = 16
MAX_RECORD_BYTES = 64 << 20
HEADER = struct.Struct(f"<8sIIQ{LOG_ID_BYTES}sI")  # magic, version, number, before, log, crc32
_PREFIX = struct.Struct("<8sI")  # of every version: magic, version
_CHECKSUM = struct.Struct("<I")
FRAME = struct.Struct("<IIQ")  # length, crc32, number
_COVERED = 8  # where in a frame begins what its checksum is of
_FIRST_KEY = b"\xa4type"  # of every record, after one byte that says how many fields it has
_ENDS = "the file ends inside"
_LOOK_AHEAD_BYTES = 4 << 20

Piece = tuple[int, bytes]  # offset of the frame, its checked payload


class TornRecord(LogError):
    """The last record is cut short: its writer was killed."""


class OtherFormat(LogError):
    """An event log of a format that this program does not read."""


@dataclass
class Segment:
    """One file of a log: its place among the others (from 0), and whether another follows it.

    `before`: how many records stand in the segments before it; `log`: the bytes that name its log;
    None: as its header says. `start`: where its first record begins, once its header has been read.
    """

    path: Path
    number: int = 0
    closed: bool = False
    before: int | None = 0
    start: int = 0
    log: bytes | None = None


@dataclass(frozen=True)
class Damage:
    """Bytes of one segment, from offset `start` up to `end`, that are no records, and why; none
    where whole records are missing, or stand in another's place.
    """

    path: Path
    start: int
    end: int
    cause: str


def seal(buffer: bytearray, at: int, number: int) -> None:
    """Write the frame, for which there is room at `at`, of the payload that fills the rest: record
    `number` of the log.
    """
    FRAME.pack_into(buffer, at, len(buffer) - at - FRAME.size, 0, number)
    with memoryview(buffer)[at + _COVERED :] as covered:
        checksum = zlib.crc32(covered)
    _CHECKSUM.pack_into(buffer, at + _COVERED - _CHECKSUM.size, checksum)


def framed(payload: bytes, number: int) -> bytes:
    """Return a payload with its frame, as record `number` of the log."""
    buffer = bytearray(FRAME.size) + payload
    seal(buffer, 0, number)
    return bytes(buffer)


def new_log_id() -> bytes:
    """Draw the bytes that name a log."""
    return secrets.token_bytes(LOG_ID_BYTES)


def header(number: int, before: int, log: bytes) -> bytes:
    """Return the header of segment `number` of the log that these bytes name, with `before` records
    in the segments before it.
    """
    data = HEADER.pack(MAGIC, FORMAT_VERSION, number, before, log, 0)[: -_CHECKSUM.size]
    return data + _CHECKSUM.pack(zlib.crc32(data))


def read_header(segment: Segment, file: BinaryIO) -> None:
    """Read and check a header; fill in what it says. Raises LogError."""
    _, cause = _check_header(segment, file)
    file.seek(0)
    if cause:
        raise LogError(_refused(Damage(segment.path, 0, 0, cause)))


def payloads(segment: Segment, file: BinaryIO) -> Iterator[Piece]:
    """Yield every record. Raises LogError at the first that is not whole; TornRecord when it is the
    last of the newest segment and cut short.
    """
    for piece in pieces(segment, file):
        if isinstance(piece, Damage):
            raise LogError(_refused(piece))
        yield piece


def payload_at(file: BinaryIO, offset: int) -> bytes:
    """Return the payload of the frame there; empty where there is none, or none that is whole."""
    return _frame_at(file, offset, os.fstat(file.fileno()).st_size)[0]


def pieces(
    segment: Segment, file: BinaryIO, begin: int = 0, number: int = 0
) -> Iterator[Piece | Damage]:
    """Yield every record, and in its place whatever damage there is: a stretch that is no record,
    or records that are missing or stand elsewhere. Fill in `segment.before` and `segment.log`.
    `begin`: from this offset on, where record `number` is due.

    Raises LogError for a file that is no log of this format, TornRecord as `payloads` does.
    """
    path, size = segment.path, os.fstat(file.fileno()).st_size
    offset, cause = _check_header(segment, file)
    due = None if cause else segment.before  # the number of the next record; None: damage hides it
    if cause:
        whole = _next_whole(file, -1, size)  # also one right there, where the header is lost
        if whole is None and not segment.number:
            raise LogError(f"{path}: offset 0: {cause}: put the run's own back")
        offset = size if whole is None else whole
        yield Damage(path, 0, offset, cause)
    elif begin:
        offset, due = begin, number
    while offset < size:
        payload, number, cause = _frame_at(file, offset, size)
        if not cause:
            if due is not None and number != due:
                yield Damage(path, offset, offset, _out_of_place(number, due))
            yield offset, payload
            offset += FRAME.size + len(payload)
            due = max(number + 1, due or 0)
            continue
        whole = _next_whole(file, offset, size)
        torn = cause.startswith(_ENDS) or _only_zeros(file, offset)
        if whole is None and torn and not segment.closed:
            raise TornRecord(f"{path}: offset {offset}: {cause}")
        end = size if whole is None else whole
        yield Damage(path, offset, end, cause)
        offset, due = end, None


def _refused(damage: Damage) -> str:
    return (
        f"{damage.path}: offset {damage.start}: {damage.cause}: put back a copy of the log, or "
        "start a new run from a checkpoint; `forage audit` reads what is left"
    )


def _out_of_place(number: int, due: int) -> str:
    """Say what is wrong where record `number` stands, and record `due` belongs."""
    if number < due:
        return f"record {number} stands behind record {due - 1}: twice, or out of its order"
    if number == due + 1:
        return f"record {due} is missing"
    return f"records {due} to {number - 1} are missing"


def _check_header(segment: Segment, file: BinaryIO) -> tuple[int, str]:
    """Return the header's length and its fault. Raises OtherFormat where a log begins."""
    found = file.read(HEADER.size)
    if len(found) < _PREFIX.size or found[: len(MAGIC)] != MAGIC:
        return 0, "not an event log"
    version = _PREFIX.unpack(found[: _PREFIX.size])[1]
    if version != FORMAT_VERSION:
        cause = f"format version {version}, this program reads {FORMAT_VERSION}"
        if segment.number:
            return 0, cause
        age = "an older" if version < FORMAT_VERSION else "a newer"
        raise OtherFormat(
            f"{segment.path}: offset {len(MAGIC)}: {cause}: {age} Forage wrote it: read this run "
            "with that one, or start another from its checkpoint: "
            "model.path=RUN/checkpoints/step-N/model"
        )
    checksum = _CHECKSUM.pack(zlib.crc32(found[: -_CHECKSUM.size]))
    if len(found) < HEADER.size or found[-_CHECKSUM.size :] != checksum:
        return 0, "the header's checksum does not agree"
    number, before, log = HEADER.unpack(found)[2:5]
    if number != segment.number:
        return 0, f"this is segment {number}, and stands in the place of {segment.number}"
    if segment.before not in (None, before):
        return 0, f"{before} records belong before this segment, there are {segment.before}"
    if segment.log not in (None, log):
        return 0, "this segment is of another log"
    segment.before, segment.start, segment.log = before, HEADER.size, log
    return segment.start, ""


def _frame_at(file: BinaryIO, offset: int, size: int) -> tuple[bytes, int, str]:
    """Return a frame's payload and number, or its fault; reads at most `size` bytes, whatever it
    claims.
    """
    file.seek(offset)
    frame = file.read(FRAME.size)
    if len(frame) < FRAME.size:
        return b"", 0, f"{_ENDS} a record's frame"
    length, checksum, number = FRAME.unpack(frame)
    if not length:
        return b"", 0, "an empty record"
    if length > MAX_RECORD_BYTES:
        return b"", 0, f"a record of {length} bytes: at most {MAX_RECORD_BYTES}"
    if offset + FRAME.size + length > size:
        return b"", 0, f"{_ENDS} a record of {length}"
    payload = file.read(length)
    if zlib.crc32(payload, zlib.crc32(frame[_COVERED:])) != checksum:
        return b"", 0, "the record's checksum does not agree"
    return payload, number, ""


def _only_zeros(file: BinaryIO, offset: int) -> bool:
    """Return True if only zeros follow, as a loss of power may leave of a write under way."""
    file.seek(offset)
    return not any(any(data) for data in iter(lambda: file.read(_LOOK_AHEAD_BYTES), b""))


def _next_whole(file: BinaryIO, offset: int, size: int) -> int | None:
    """Return where the first whole record behind `offset` begins, or may begin: no more than the
    file's own bytes are read of what only looks like one.
    """
    before = FRAME.size + 1  # of a record, in front of its first key
    spare = max(size, MAX_RECORD_BYTES)
    at = offset + 1
    while at < size:
        file.seek(at)
        data = file.read(_LOOK_AHEAD_BYTES + before + len(_FIRST_KEY))
        found = data.find(_FIRST_KEY, before)
        while found >= 0:
            start = at + found - before
            length = int.from_bytes(data[found - before : found - before + 4], "little")
            if length <= min(MAX_RECORD_BYTES, size - start - FRAME.size):  # else it is not read
                if length > spare or not _frame_at(file, start, size)[2]:
                    return start
                spare -= length
            found = data.find(_FIRST_KEY, found + 1)
        at += _LOOK_AHEAD_BYTES
    return None

"""The bytes of one segment of an event log, and where damage in them ends.

Header: magic `FORAGELG`, u32 format version, u32 number of the segment, u64 count of the records in
the segments before it, u32 crc32 of all that. Then per record: u32 length, u32 crc32 of the
payload, payload (one record of `replay.log.records` in msgpack). Integers are little-endian.

A writer that is killed leaves a last frame of the newest segment cut short, and nothing behind it:
the same bytes with a whole record behind them, or in a closed segment, are damage, and history that
must not be cut off.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from replay.protocol import LogError

FORMAT_VERSION = 2
MAGIC = b"FORAGELG"
MAX_RECORD_BYTES = 64 << 20
HEADER = struct.Struct("<8sIIQI")  # magic, version, number, records before, crc32
_PREFIX = struct.Struct("<8sI")  # of every version: magic, version
_CHECKSUM = struct.Struct("<I")
FRAME = struct.Struct("<II")  # length, crc32
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

    `before`: how many records stand in the segments before it; None: as its header says. `start`:
    where its first record begins, once its header has been read.
    """

    path: Path
    number: int = 0
    closed: bool = False
    before: int | None = 0
    start: int = 0


@dataclass(frozen=True)
class Damage:
    """Bytes of one segment, from offset `start` up to `end`, that are no records, and why."""

    path: Path
    start: int
    end: int
    cause: str


def seal(buffer: bytearray, at: int) -> None:
    """Write the frame, for which there is room at `at`, of the payload that fills the rest."""
    with memoryview(buffer)[at + FRAME.size :] as payload:
        frame = FRAME.pack(len(payload), zlib.crc32(payload))
    buffer[at : at + FRAME.size] = frame


def framed(payload: bytes) -> bytes:
    """Return a payload with its frame."""
    buffer = bytearray(FRAME.size) + payload
    seal(buffer, 0)
    return bytes(buffer)


def header(number: int, before: int) -> bytes:
    """Return the header of segment `number`, with `before` records in the segments before it."""
    data = HEADER.pack(MAGIC, FORMAT_VERSION, number, before, 0)[: -_CHECKSUM.size]
    return data + _CHECKSUM.pack(zlib.crc32(data))


def payloads(segment: Segment, file: BinaryIO) -> Iterator[Piece]:
    """Yield every record. Raises LogError at the first that is not whole; TornRecord when it is the
    last of the newest segment and cut short.
    """
    for piece in pieces(segment, file):
        if isinstance(piece, Damage):
            raise LogError(
                f"{piece.path}: offset {piece.start}: {piece.cause}: put back a copy of the log, "
                "or start a new run from a checkpoint; `forage audit` reads what is left"
            )
        yield piece


def pieces(segment: Segment, file: BinaryIO) -> Iterator[Piece | Damage]:
    """Yield every record, and every stretch between records that is none; fill in `segment.before`.

    Raises LogError for a file that is no log of this format, TornRecord as `payloads` does.
    """
    path, size = segment.path, os.fstat(file.fileno()).st_size
    offset, cause = _check_header(segment, file)
    if cause:
        whole = _next_whole(file, -1, size)  # also one right there, where the header is lost
        if whole is None and not segment.number:
            raise LogError(f"{path}: offset 0: {cause}: put the run's own back")
        offset = size if whole is None else whole
        yield Damage(path, 0, offset, cause)
    while offset < size:
        payload, cause = _frame_at(file, offset, size)
        if not cause:
            yield offset, payload
            offset += FRAME.size + len(payload)
            continue
        whole = _next_whole(file, offset, size)
        torn = cause.startswith(_ENDS) or _only_zeros(file, offset)
        if whole is None and torn and not segment.closed:
            raise TornRecord(f"{path}: offset {offset}: {cause}")
        end = size if whole is None else whole
        yield Damage(path, offset, end, cause)
        offset = end


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
        raise OtherFormat(f"{segment.path}: offset {len(MAGIC)}: {cause}")
    checksum = _CHECKSUM.pack(zlib.crc32(found[: -_CHECKSUM.size]))
    if len(found) < HEADER.size or found[-_CHECKSUM.size :] != checksum:
        return 0, "the header's checksum does not agree"
    number, before = HEADER.unpack(found)[2:4]
    if number != segment.number:
        return 0, f"this is segment {number}, and stands in the place of {segment.number}"
    if segment.before not in (None, before):
        return 0, f"{before} records belong before this segment, there are {segment.before}"
    segment.before, segment.start = before, HEADER.size
    return segment.start, ""


def _frame_at(file: BinaryIO, offset: int, size: int) -> tuple[bytes, str]:
    """Return a frame's payload, or its fault; reads at most `size` bytes, whatever it claims."""
    file.seek(offset)
    frame = file.read(FRAME.size)
    if len(frame) < FRAME.size:
        return b"", f"{_ENDS} a record's frame"
    length, checksum = FRAME.unpack(frame)
    if not length:
        return b"", "an empty record"
    if length > MAX_RECORD_BYTES:
        return b"", f"a record of {length} bytes: at most {MAX_RECORD_BYTES}"
    if offset + FRAME.size + length > size:
        return b"", f"{_ENDS} a record of {length}"
    payload = file.read(length)
    if zlib.crc32(payload) != checksum:
        return b"", "the record's checksum does not agree"
    return payload, ""


def _only_zeros(file: BinaryIO, offset: int) -> bool:
    """Return True if only zeros follow, as a loss of power may leave of a write under way."""
    file.seek(offset)
    return not any(any(data) for data in iter(lambda: file.read(_LOOK_AHEAD_BYTES), b""))


def _next_whole(file: BinaryIO, offset: int, size: int) -> int | None:
    """Return where the first whole record behind `offset` begins."""
    before = FRAME.size + 1  # of a record, in front of its first key
    at = offset + 1
    while at < size:
        file.seek(at)
        data = file.read(_LOOK_AHEAD_BYTES + before + len(_FIRST_KEY))
        found = data.find(_FIRST_KEY, before)
        while found >= 0:
            start = at + found - before
            if not _frame_at(file, start, size)[1]:
                return start
            found = data.find(_FIRST_KEY, found + 1)
        at += _LOOK_AHEAD_BYTES
    return None

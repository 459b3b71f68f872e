"""The bytes of an event log: a header, then one frame per record; and where damage ends.

Magic `FORAGELG`, u32 format version, then per record u32 length, u32 crc32 of the payload, payload
(one record of `replay.records` in msgpack). Integers are little-endian. A writer that is killed
leaves a last frame that is cut short, and nothing behind it: the same bytes with a whole record
behind them are damage, and history that must not be cut off.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from replay.protocol import LogError

FORMAT_VERSION = 1
MAGIC = b"FORAGELG"
MAX_RECORD_BYTES = 64 << 20
HEADER = struct.Struct("<8sI")
FRAME = struct.Struct("<II")  # length, crc32
_FIRST_KEY = b"\xa4type"  # of every record, after one byte that says how many fields it has
_ENDS = "the file ends inside"
_LOOK_AHEAD_BYTES = 4 << 20

Piece = tuple[int, bytes]  # offset of the frame, its checked payload


class TornRecord(LogError):
    """The last record is cut short: its writer was killed."""


@dataclass(frozen=True)
class Damage:
    """Bytes from offset `start` up to `end` that are no records, and why."""

    start: int
    end: int
    cause: str


def seal(buffer: bytearray, at: int) -> None:
    """Write the frame, for which there is room at `at`, of the payload that fills the rest."""
    with memoryview(buffer)[at + FRAME.size :] as payload:
        frame = FRAME.pack(len(payload), zlib.crc32(payload))
    buffer[at : at + FRAME.size] = frame


def payloads(path: Path, file: BinaryIO) -> Iterator[Piece]:
    """Every record. Raises LogError at the first that is not whole; TornRecord when it is the last
    and cut short.
    """
    for piece in pieces(path, file):
        if isinstance(piece, Damage):
            raise LogError(
                f"{path}: offset {piece.start}: {piece.cause}: put back a copy of the log, or "
                "start a new run from a checkpoint; `scripts/audit.py` reads what is left"
            )
        yield piece


def pieces(path: Path, file: BinaryIO) -> Iterator[Piece | Damage]:
    """Every record, and every stretch between records that is none. Raises LogError for a file that
    is no log of this format, TornRecord as `payloads` does.
    """
    _check_header(path, file)
    offset, size = HEADER.size, os.fstat(file.fileno()).st_size
    while offset < size:
        payload, cause = _frame_at(file, offset, size)
        if not cause:
            yield offset, payload
            offset += FRAME.size + len(payload)
            continue
        whole = _next_whole(file, offset, size)
        if whole is None and (cause.startswith(_ENDS) or _only_zeros(file, offset)):
            raise TornRecord(f"{path}: offset {offset}: {cause}")
        end = size if whole is None else whole
        yield Damage(offset, end, cause)
        offset = end


def _check_header(path: Path, file: BinaryIO) -> None:
    header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise LogError(f"{path}: offset 0: not an event log: put the run's own back")
    version = HEADER.unpack(header)[1]
    if version != FORMAT_VERSION:
        raise LogError(
            f"{path}: offset {len(MAGIC)}: format version {version}, this program reads "
            f"{FORMAT_VERSION}"
        )


def _frame_at(file: BinaryIO, offset: int, size: int) -> tuple[bytes, str]:
    """The payload of the frame at `offset`, or what is wrong with it. `size` bounds what is read:
    no length is believed.
    """
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
    """What a machine that loses power may leave of a write that was never acknowledged."""
    file.seek(offset)
    return not any(any(data) for data in iter(lambda: file.read(_LOOK_AHEAD_BYTES), b""))


def _next_whole(file: BinaryIO, offset: int, size: int) -> int | None:
    """Where the first whole record behind `offset` begins."""
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

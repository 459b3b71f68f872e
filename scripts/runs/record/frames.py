"""The frames of an event log, read from docs/records.md alone, whatever has been done to its files.

What is no record is told and passed over, so that one flipped byte does not hide the rest.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_HEADER = struct.Struct("<8sIIQ16sI")  # magic, format, segment, records before, log, crc32
_FRAME = struct.Struct("<IIQ")  # length, crc32, number
_MAGIC, _FORMAT = b"FORAGELG", 3
_MOST_BYTES = 64 << 20  # of a payload
_NUMBER_AT = 8  # where the checksum of a frame begins to cover it
_FIRST_KEY = b"\xa4type"  # of a record, behind the byte that counts its fields
_CHUNK_BYTES = 4 << 20
_BUFFER_BYTES = 1 << 20


class UnreadableLog(ValueError):
    """There is no event log of this format."""


@dataclass(frozen=True)
class Frame:
    """One record as it lies in the log: its number, and the bytes of it."""

    number: int
    payload: bytes


@dataclass(frozen=True)
class Gap:
    """A place where the log is not whole, and why; `torn`: the writer was killed there."""

    path: Path
    offset: int
    cause: str
    torn: bool = False

    def __str__(self) -> str:
        return f"{self.path}: offset {self.offset}: {self.cause}"


def segment_files(path: Path) -> list[Path]:
    """Return the log's files in order. Raises UnreadableLog where one is missing."""
    pattern = re.compile(re.escape(path.name) + r"\.([0-9]{6,})")
    numbers = [int(m[1]) for each in path.parent.iterdir() if (m := pattern.fullmatch(each.name))]
    files = [path] + [path.with_name(f"{path.name}.{n:06}") for n in sorted(numbers)]
    for number, file in enumerate(files):
        wanted = path.with_name(f"{path.name}.{number:06}") if number else path
        if file != wanted or not file.is_file():
            raise UnreadableLog(f"{wanted}: this segment of the event log is missing: put it back")
    return files


def opened(path: Path) -> BinaryIO:
    """Open a segment to be read."""
    return path.open("rb", buffering=_BUFFER_BYTES)


class LogReader:
    """Every frame of a log in order, and every gap in its place; `bytes_read` counts on."""

    def __init__(self, path: Path) -> None:
        """Raises UnreadableLog where a segment is missing."""
        self.files = segment_files(path)
        self.bytes_read = 0
        self._due: int | None = 0  # number of the next record; None: a gap hides it
        self._log = b""

    def __iter__(self) -> Iterator[Frame | Gap]:
        for place, path in enumerate(self.files):
            before = self.bytes_read
            with opened(path) as file:
                size = os.fstat(file.fileno()).st_size  # compaction may replace it by name
                yield from self._segment(path, place, file, size)
            self.bytes_read = before + size

    def _segment(self, path: Path, place: int, file: BinaryIO, size: int) -> Iterator[Frame | Gap]:
        start, offset = self.bytes_read, _HEADER.size
        if cause := self._header_fault(path, place, file.read(_HEADER.size)):
            found = _next_frame(file, -1, size)
            if found is None and not place:
                raise UnreadableLog(f"{path}: offset 0: {cause}: put the run's own back")
            yield Gap(path, 0, cause)
            offset, self._due = size if found is None else found, None
        while offset < size:
            self.bytes_read = start + offset
            frame = _frame_at(file, offset, size)
            if isinstance(frame, Frame):
                if cause := self._order_fault(frame.number):
                    yield Gap(path, offset, cause)
                self._due = max(frame.number + 1, self._due or 0)
                yield frame
                offset += _FRAME.size + len(frame.payload)
                continue
            found = _next_frame(file, offset, size)
            cut = frame.startswith("the file ends") or _is_zero(file, offset)
            if found is None and cut and place == len(self.files) - 1:
                yield Gap(path, offset, frame, torn=True)
                return
            end = size if found is None else found
            yield Gap(path, offset, f"{end - offset} bytes cannot be read: {frame}")
            offset, self._due = end, None

    def _header_fault(self, path: Path, place: int, data: bytes) -> str:
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            return "not an event log"
        _, version, segment, before, log, checksum = _HEADER.unpack(data)
        if version != _FORMAT:
            if not place:
                raise UnreadableLog(
                    f"{path}: offset {len(_MAGIC)}: format version {version}, this program reads "
                    f"{_FORMAT}: read this run with the Forage that wrote it"
                )
            return f"format version {version}, not {_FORMAT}"
        if zlib.crc32(data[:-4]) != checksum:
            return "the header's checksum does not agree"
        if segment != place:
            return f"this is segment {segment}, and stands in the place of {place}"
        if self._due not in (None, before):
            return f"{before} records belong before this segment, there are {self._due}"
        if self._log and log != self._log:
            return "this segment is of another log"
        self._log, self._due = log, before
        return ""

    def _order_fault(self, number: int) -> str:
        due = self._due
        if due is None or number == due:
            return ""
        if number < due:
            return f"record {number} stands behind record {due - 1}: twice, or out of its order"
        if number == due + 1:
            return f"record {due} is missing"
        return f"records {due} to {number - 1} are missing"


def _frame_at(file: BinaryIO, offset: int, size: int) -> Frame | str:
    """Return the frame there, or why there is none."""
    file.seek(offset)
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return "the file ends inside a record's frame"
    length, checksum, number = _FRAME.unpack(head)
    if not 0 < length <= _MOST_BYTES:
        return f"a record of {length} bytes: 1 to {_MOST_BYTES}"
    if offset + _FRAME.size + length > size:
        return f"the file ends inside a record of {length}"
    payload = file.read(length)
    if zlib.crc32(payload, zlib.crc32(head[_NUMBER_AT:])) != checksum:
        return "the record's checksum does not agree"
    return Frame(number, payload)


def _next_frame(file: BinaryIO, offset: int, size: int) -> int | None:
    """Return where the first whole frame behind `offset` begins."""
    lead = _FRAME.size + 1  # the frame, and the byte that counts the fields
    for at in range(offset + 1, size, _CHUNK_BYTES):
        file.seek(at)
        data = file.read(_CHUNK_BYTES + lead + len(_FIRST_KEY))
        for found in re.finditer(_FIRST_KEY, data):
            start = at + found.start() - lead
            if start >= at and isinstance(_frame_at(file, start, size), Frame):
                return start
    return None


def _is_zero(file: BinaryIO, offset: int) -> bool:
    """True where nothing but zeros follows, which a loss of power may leave."""
    file.seek(offset)
    return not any(any(data) for data in iter(lambda: file.read(_CHUNK_BYTES), b""))

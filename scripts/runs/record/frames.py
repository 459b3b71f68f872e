"""The frames of an event log, read from docs/records.md alone, whatever has been done to its files.

What is no record is told and passed over, so that one flipped byte does not hide the rest.
"""

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

_HEADER = struct.Struct("<8sIIQ16sI")  # magic, format, segment, records before, log, crc32
_FRAME = struct.Struct("<IIQ")  # length, crc32, number
_MAGIC, _FORMAT = b"FORAGELG", 3
_MOST_BYTES = 64 << 20  # of a payload
_NUMBER_AT = 8  # where the checksum of a frame begins to cover it
_FIRST_KEY = b"\xa4type"  # of a record, behind the byte that counts its fields
_FIRST_BYTES, _CHUNK_BYTES = 4 << 10, 4 << 20  # looked through at once, behind damage
_CUT = "the file ends inside"
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
    later = (path.with_name(f"{path.name}.{n:06}") for n in range(1, max(numbers, default=0) + 1))
    files = [path, *later]
    for file in files:  # looked for by name: a listing may lack what is replaced meanwhile
        if not file.is_file():
            raise UnreadableLog(f"{file}: this segment of the event log is missing: put it back")
    return files


def opened(path: Path) -> BinaryIO:
    """Open a segment to be read."""
    return path.open("rb", buffering=_BUFFER_BYTES)


class LogReader:
    """Every frame of a log in order, and every gap in its place; `bytes_read` counts on.

    The log may be written and compacted meanwhile. Compaction replaces a closed segment, and only
    once what settles its payloads is on the disk: so the end of the log is looked for anew until no
    other segment follows, and lies behind all that those read before depend on.
    """

    def __init__(self, path: Path) -> None:
        """Raises UnreadableLog where a segment is missing, also while it is read."""
        self._path = path
        self.files = segment_files(path)
        self.bytes_read = 0
        self._due: int | None = 0  # number of the next record; None: a gap hides it
        self._log = b""

    def __iter__(self) -> Iterator[Frame | Gap]:
        place = 0
        while place < len(self.files):
            before = self.bytes_read
            with opened(self.files[place]) as file:
                segment = _Segment(self.files[place], file, partial(self._is_closed, place))
                for offset, piece in self._pieces(segment, place):
                    self.bytes_read = before + offset
                    yield piece
                self.bytes_read = before + segment.size
            place += 1

    def _is_closed(self, place: int) -> bool:
        if place == len(self.files) - 1:
            self.files = segment_files(self._path)
        return place < len(self.files) - 1

    def _pieces(self, segment: "_Segment", place: int) -> Iterator[tuple[int, Frame | Gap]]:
        """Yield frames and gaps, each with its offset."""
        path, offset = segment.path, _HEADER.size
        if cause := self._header_fault(path, place, segment.header()):
            found = segment.next_frame(-1)
            if found is None and not place:
                raise UnreadableLog(f"{path}: offset 0: {cause}: put the run's own back")
            yield 0, Gap(path, 0, cause)
            offset, self._due = segment.size if found is None else found, None
        while offset < segment.size or (segment.has_changed() and segment.closed):
            frame = segment.frame_at(offset)
            if isinstance(frame, Frame):
                if cause := self._order_fault(frame.number):
                    yield offset, Gap(path, offset, cause)
                self._due = max(frame.number + 1, self._due or 0)
                yield offset, frame
                offset += _FRAME.size + len(frame.payload)
                continue
            if segment.has_another_size():  # it was being written
                continue
            found = segment.next_frame(offset)
            if found is None and segment.is_torn(offset, frame):
                yield offset, Gap(path, offset, frame, torn=True)
                return
            end = segment.size if found is None else found
            yield offset, Gap(path, offset, f"{end - offset} bytes cannot be read: {frame}")
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


class _Segment:
    """One file of a log: `size` bytes of it are to be read, all of them where it is `closed`."""

    def __init__(self, path: Path, file: BinaryIO, is_closed: Callable[[], bool]) -> None:
        self.path, self._file, self._is_closed = path, file, is_closed
        self.closed, self.size = self._measured()
        # So many bytes may be read in vain: else a file of nothing but lengths takes days.
        self._spare, self._passed_over = max(self.size, _MOST_BYTES), False

    def has_changed(self) -> bool:
        """True where its size is another than before; that of a closed one is final."""
        before = self.size
        if not self.closed:
            self.closed, self.size = self._measured()
        return self.size != before

    def has_another_size(self) -> bool:
        """`has_changed`, without a look at the folder where it has not: damage may be everywhere,
        and other files by the thousand.
        """
        stays = self.closed or os.fstat(self._file.fileno()).st_size == self.size
        return not stays and self.has_changed()

    def header(self) -> bytes:
        """Return its first bytes."""
        return self._at(0, _HEADER.size)

    def frame_at(self, offset: int) -> Frame | str:
        """Return the frame there, or why there is none."""
        head = self._at(offset, _FRAME.size)
        if len(head) < _FRAME.size:
            return f"{_CUT} a record's frame"
        length, checksum, number = _FRAME.unpack(head)
        if not 0 < length <= _MOST_BYTES:
            return f"a record of {length} bytes: 1 to {_MOST_BYTES}"
        if offset + _FRAME.size + length > self.size:
            return f"{_CUT} a record of {length}"
        if length > self._spare:
            self._passed_over = True
            return f"a record of {length} bytes behind too much that is none"
        payload = self._file.read(length)
        if zlib.crc32(payload, zlib.crc32(head[_NUMBER_AT:])) != checksum:
            self._spare -= length
            return "the record's checksum does not agree"
        return Frame(number, payload)

    def next_frame(self, offset: int) -> int | None:
        """Return where the first whole frame behind `offset` begins."""
        starts = self._candidates(offset + 1)
        return next((at for at in starts if isinstance(self.frame_at(at), Frame)), None)

    def is_torn(self, offset: int, cause: str) -> bool:
        """True where a writer was killed, or the power lost, while this last record was written."""
        if self.closed or self._passed_over or self._is_closed():
            return False
        return cause.startswith(_CUT) or self._is_zero(offset)

    def _measured(self) -> tuple[bool, int]:
        closed = self._is_closed()  # before its size is asked for, which is final then
        return closed, self._file.seek(0, os.SEEK_END)  # and nothing stays buffered

    def _at(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(length)

    def _candidates(self, at: int) -> Iterator[int]:
        """Yield where a frame may begin, from `at` on: by the key that all records begin with."""
        lead, chunk = _FRAME.size + 1, _FIRST_BYTES  # the frame, and the byte that counts fields
        while at < self.size:
            data = self._at(at, chunk + lead + len(_FIRST_KEY))
            starts = (found.start() - lead for found in re.finditer(_FIRST_KEY, data))
            yield from (at + start for start in starts if 0 <= start < chunk)
            at, chunk = at + chunk, min(2 * chunk, _CHUNK_BYTES)

    def _is_zero(self, offset: int) -> bool:
        self._file.seek(offset)
        return not any(any(data) for data in iter(lambda: self._file.read(_CHUNK_BYTES), b""))

"""A log from some record on, read in one pass; what stands before is not read.

Segments are looked for by name, and one that is missing is refused. Those that are read must be of
one log and follow each other.
"""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from replay.log.format import FRAME, Segment, TornRecord, payloads, read_header
from replay.log.records import Delivered, Record, decoded
from replay.log.segments import opened, segments
from replay.protocol import LogError


@dataclass(frozen=True)
class End:
    """The place where a log goes on: its newest segment, and up to where that is whole."""

    segment: Segment
    offset: int
    records: int  # in all segments


class Tail:
    """The records of the log at `path` from number `after` on."""

    def __init__(self, path: Path, after: int = 0) -> None:
        self._path, self._after = path, after
        self._segment, self._offset, self._records = Segment(path), 0, 0
        self._read = self._size = 0  # bytes of segments: read before this one, of all

    @property
    def end(self) -> End:
        """The end of what has been read so far; of all, once no more comes."""
        return End(self._segment, self._offset or self._segment.start, self._records)

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that are read, and of how many."""
        return self._read + self._offset, self._size

    def __iter__(self) -> Iterator[Record]:
        """Yield each record. Raises LogError at the first that is not whole."""
        for path, offset, payload in self.pieces():
            yield decoded(path, offset, payload)

    def pieces(self) -> Iterator[tuple[Path, int, bytes]]:
        """Yield segment, offset and payload of each record. Raises LogError."""
        found = from_record(segments(self._path), self._after)
        self._records, log = found[0].before or 0, None
        with suppress(OSError):  # whoever opens it says so
            self._size = sum(segment.path.stat().st_size for segment in found)
        for segment in found:
            self._read += self._offset
            segment.before, segment.log = self._records, log
            self._segment, self._offset = segment, 0
            with opened(segment.path) as file:
                for offset, payload in payloads(segment, file):
                    self._offset = offset + FRAME.size + len(payload)
                    self._records += 1
                    if self._records > self._after:
                        yield segment.path, offset, payload
            log = segment.log


def log_end(path: Path) -> End:
    """Return the end of the last whole record. Raises LogError where damage follows."""
    tail = Tail(path)
    with suppress(TornRecord):
        for _ in tail.pieces():
            pass
    return tail.end


def log_id(path: Path) -> bytes:
    """Return the bytes that name the log at `path`. Raises LogError."""
    newest = segments(path)[-1]
    with opened(newest.path) as file:
        newest.before = None
        read_header(newest, file)
    return newest.log or b""


def payloads_of(path: Path, wanted: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """Yield number and payload of the deliveries that are these records. Raises LogError."""
    left = deque(sorted(wanted))
    found = from_record(segments(path), left[0]) if left else []
    for segment, following in zip_longest(found, found[1:]):
        if not left or (following and (following.before or 0) <= left[0]):
            continue
        with opened(segment.path) as file:
            numbered = enumerate(payloads(segment, file), segment.before or 0)
            for number, (offset, payload) in numbered:
                if number == left[0]:
                    fact = decoded(segment.path, offset, payload)
                    if not isinstance(fact, Delivered):
                        raise LogError(f"{segment.path}: record {number} is no delivery")
                    yield left.popleft(), fact.payload
                    if not left:
                        return


def from_record(found: list[Segment], number: int) -> list[Segment]:
    """Return the segment that holds this record, or the end of the log, and those after it; their
    `before` is what their headers say. Raises LogError where one cannot be read.
    """
    for place in range(len(found) - 1 if number else 0, 0, -1):
        segment = found[place]
        segment.before = None
        with opened(segment.path) as file:
            read_header(segment, file)
        if (segment.before or 0) <= number:
            return found[place:]
    return found

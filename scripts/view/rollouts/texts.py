"""The texts of all rollouts that are searched: in a file, one after the other, gone through by
every search. An index of their parts would take longer to make than all else that is read.
"""

import os
import threading
from array import array
from bisect import bisect_right
from pathlib import Path

BLOCK = 1 << 20  # bytes that are written, and looked through, at once
MOST_LOOKS = 8  # searches of which it is kept what they found
_END = b"\0"  # of a text


class Texts:
    """The file; of several threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._unwritten, self._size = bytearray(), 0
        self._ends = array("q")  # of each text, in the file
        self._looks: dict[bytes, bytearray] = {}  # the newest last

    def close(self) -> None:
        """Close the file."""
        with self._looking, self._lock:
            self._file.close()

    def add(self, text: str) -> int:
        """Take one more; return its number, from 1. Raises OSError where the disk is full."""
        raw = text.lower().encode("utf-8", "replace").replace(_END, b"") + _END
        with self._lock:
            self._unwritten += raw
            self._ends.append((self._ends[-1] if self._ends else 0) + len(raw))
            if len(self._unwritten) >= BLOCK:
                self._write()
            return len(self._ends)

    def holding(self, words: str) -> bytes:
        """Return a byte for each text: 1 where the words stand in it. Raises OSError."""
        sought = words.lower().encode("utf-8", "replace")
        with self._looking:
            with self._lock:
                self._write()
                count = len(self._ends)
            marks = self._looks.pop(sought, bytearray())
            if len(marks) < count:
                self._look(sought, marks, count)
            self._looks[sought] = marks
            if len(self._looks) > MOST_LOOKS:
                del self._looks[next(iter(self._looks))]
            return bytes(marks)

    def _write(self) -> None:
        while self._unwritten:
            count = os.pwrite(self._file.fileno(), self._unwritten, self._size)
            del self._unwritten[:count]
            self._size += count

    def _look(self, sought: bytes, marks: bytearray, count: int) -> None:
        """Go through the texts that have no mark yet, up to so many."""
        at, end = self._ends[len(marks) - 1] if marks else 0, self._ends[count - 1]
        marks.extend(bytes(count - len(marks)))
        if _END in sought:
            return
        block = bytearray(BLOCK)
        while at < end:
            got = os.preadv(self._file.fileno(), [block], at)
            place = block.find(sought, 0, min(got, end - at))
            while place >= 0:
                number = bisect_right(self._ends, at + place)
                marks[number] = 1
                place = block.find(sought, self._ends[number] - at, min(got, end - at))
            # What the words may begin with at a block's end is looked at again.
            at += max(got - len(sought) + 1, 1) if at + got < end else got or end

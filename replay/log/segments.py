"""The files of an event log: `events.log`, then `events.log.000001`, `events.log.000002`, …

History goes from the first file to the last. The first keeps the log's own name for good, so that
whoever looks for the log, or locks it, finds it at any instant; the one with the highest number is
appended to, the others are closed. A segment is made under another name (`….draft`), header
included, and forced to the disk before it is named: whatever a crash leaves is a whole log with or
without an empty last segment, and perhaps a draft that nobody reads. Compaction replaces a closed
segment in the same way, whole. No name is ever taken away, so a gap in the numbers is a loss.
"""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from configs.runtime import files
from configs.runtime.files import DRAFT_SUFFIX, Locked, LockUnsupported, open_locked, replacing
from replay.log.format import Segment, header
from replay.protocol import LogError

_HOLDER = "replay, or forage compact,"


def segment_path(path: Path, number: int) -> Path:
    """Return the path of segment `number` of the log at `path`; 0 is the log's own name."""
    return path.with_name(f"{path.name}.{number:06}") if number else path


def exists(path: Path) -> bool:
    """Return True if any segment of this log is there."""
    return path.exists() or bool(numbers(path))


def segments(path: Path) -> list[Segment]:
    """Return the segments that the log has now, in order. Raises LogError when one is missing.

    A writer may add to the last of them meanwhile, or begin another: what is read is a beginning of
    the log all the same.
    """
    found = numbers(path)
    last = max(found, default=0)
    there = {0, *found} if path.exists() or not found else found
    # Looked for by name as well: a listing may lack what compaction replaces meanwhile.
    absent = (number for number in range(last) if number not in there)
    missing = [number for number in absent if not segment_path(path, number).exists()]
    if missing:
        raise LogError(
            f"{segment_path(path, missing[0])}: this segment of the event log is missing, but "
            f"{segment_path(path, last).name} is there: put it back"
        )
    return [Segment(segment_path(path, n), n, closed=n < last) for n in range(last + 1)]


def begin(path: Path, number: int, before: int, log: bytes) -> int:
    """Make segment `number`, with `before` records in front of it, of the log that these bytes
    name; return it open for appending.

    Raises OSError; then there is no such segment, or an empty one, and it can be begun again.
    """
    final = segment_path(path, number)
    with ExitStack() as closing:
        with replacing(final) as draft:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            closing.callback(os.close, fd)
            write_all(fd, header(number, before, log))
        closing.pop_all()  # it stays open for the caller
    return fd


def opened(path: Path) -> BinaryIO:
    """Open a segment to be read. Raises LogError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error


def clear_drafts(path: Path) -> None:
    """Remove what a crash left of segments that never were. Raises OSError. Hold the lock."""
    for draft in path.parent.glob(f"{path.name}*{DRAFT_SUFFIX}"):
        draft.unlink()


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data`. Raises OSError."""
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done:])


def locked(path: Path) -> int:
    """Open the log's first segment, locked until it is closed. Raises LogError, OSError."""
    segments(path)  # none is missing
    with _refused(path):  # compaction may put another file there: that one is locked then
        return open_locked(path, _HOLDER, os.O_WRONLY | os.O_APPEND)


def lock(path: Path, fd: int, *, shared: bool = False) -> None:
    """Lock the first segment of a log, open as `fd`. Raises LogError while another has it."""
    with _refused(path):
        files.lock(fd, path, _HOLDER, shared=shared)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except Locked as error:
        raise LogError(
            f"{path}: another process writes it (replay, or forage compact): end it first"
        ) from error
    except LockUnsupported as error:
        raise LogError(
            f"{path}: cannot be locked: {error.strerror}: choose a run_dir on another file system"
        ) from error


def numbers(path: Path, suffix: str = "") -> set[int]:
    """Return the numbers of the segments but the first, or of the files beside segments, the first
    included, whose names end with `suffix`.
    """
    number = r"\.([0-9]{6,})" if not suffix else r"(?:\.([0-9]{6,}))?"
    pattern = re.compile(re.escape(path.name) + number + re.escape(suffix))
    found = (pattern.fullmatch(name) for name in _names(path.parent))
    return {int(match[1] or 0) for match in found if match}


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []  # whoever opens the log will say so

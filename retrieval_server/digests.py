"""Sizes and digests of files; a cache of the large ones', which take minutes to read.

A run reads its index and corpus to be sure of them when it is checked, when the server starts and
whenever it is started again. What is remembered holds while path, size, time of change and inode
are the same, in `$XDG_CACHE_HOME/forage` (`~/.cache/forage`).
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from configs.runtime.files import replacing

LARGE_BYTES = 256 << 20
_TOLD_BYTES = 4 << 30  # reading so much is said beforehand
_KEPT = 256
logger = logging.getLogger("retrieval_server")
Stamp = tuple[str, int, int, int]  # path, size, time of change and inode


class Mark(msgspec.Struct, frozen=True):
    """A file's, or several files', size and digest."""

    bytes: int
    blake3: str


class _Entry(msgspec.Struct, frozen=True):
    stamps: tuple[Stamp, ...]
    mark: Mark


def mark(files: Sequence[Path], large_bytes: int = LARGE_BYTES) -> Mark:
    """Size and digest of files, one after another. Raises OSError."""
    stamps = tuple(map(stamp, files))
    size = sum(each[1] for each in stamps)
    if size < large_bytes:
        return _read(files, size)
    for entry in (entries := _remembered()):
        if entry.stamps == stamps:
            return entry.mark
    if size >= _TOLD_BYTES:
        logger.warning("reading %.0f GB to check them, once: %s", size / 1e9, files[0])
    entry = _Entry(stamps, _read(files, size))
    if tuple(map(stamp, files)) == stamps:
        _remember([entry, *entries][:_KEPT])
    return entry.mark


def _read(files: Sequence[Path], size: int) -> Mark:
    digest = blake3(max_threads=blake3.AUTO)
    for path in files:
        digest.update_mmap(path)
    return Mark(size, digest.hexdigest(length=16))


def stamp(path: Path) -> Stamp:
    """What changes with a file. Raises OSError."""
    seen = path.stat()
    return str(path.resolve()), seen.st_size, seen.st_mtime_ns, seen.st_ino


def cache_folder() -> Path:
    """The folder of what is remembered of files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forage"


def _place() -> Path:
    return cache_folder() / "digests.json"


def _remembered() -> list[_Entry]:
    """The cached entries; none where there is no such file, or it holds something else."""
    try:
        return msgspec.json.decode(_place().read_bytes(), type=list[_Entry])
    except (OSError, msgspec.DecodeError):
        return []


def _remember(entries: list[_Entry]) -> None:
    """Write the cache where it can be written; else the files are read again."""
    place = _place()
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place, durable=False, contended=True) as draft:
            draft.write_bytes(msgspec.json.encode(entries))

"""Where a large corpus' passages begin, remembered: to find out is to check every line of it.

A run reads its corpus when it is checked and whenever its server starts. What is remembered holds
while path, size, time of change and inode are the same, in `$XDG_CACHE_HOME/forage/offsets`
(`~/.cache/forage/offsets`): a file for each corpus, eight bytes a passage after a head that holds
their digest. What is damaged, cut short or of another file is done without.
"""

import contextlib
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from configs.runtime.files import replacing
from retrieval_server.digests import Stamp, cache_folder

_FORMAT = 1  # of the files, and of what `corpus_files` checks
_HEAD_BYTES = 512
_KEPT = 8  # corpora, those read last


class _Head(msgspec.Struct, frozen=True):
    format: int
    stamp: str
    passages: int
    blake3: str


def remembered(stamp: Stamp) -> NDArray[np.int64] | None:
    """The offsets of the corpus with this stamp, memory-mapped; None where none are known."""
    place = _place(stamp)
    try:
        with place.open("rb") as file:
            head = msgspec.json.decode(file.read(_HEAD_BYTES).rstrip(), type=_Head)
        starts = np.memmap(place, np.int64, "r", _HEAD_BYTES, (head.passages,))
    except (OSError, ValueError):
        return None
    if head != _head(stamp, starts) or place.stat().st_size != _HEAD_BYTES + starts.nbytes:
        return None
    with contextlib.suppress(OSError):
        place.touch()
    return starts


def remember(stamp: Stamp, starts: NDArray[np.int64]) -> None:
    """Write them where that can be done; else the corpus is scanned again."""
    place = _place(stamp)
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place, durable=False, contended=True) as draft, draft.open("wb") as file:
            file.write(msgspec.json.encode(_head(stamp, starts)).ljust(_HEAD_BYTES))
            file.write(starts.data)
        older = sorted(place.parent.glob("*.starts"), key=lambda path: path.stat().st_mtime)
        for path in older[:-_KEPT]:
            path.unlink()


def _head(stamp: Stamp, starts: NDArray[np.int64]) -> _Head:
    digest = blake3(starts.view(np.uint8).data, max_threads=blake3.AUTO).hexdigest(length=16)
    told = blake3(msgspec.json.encode(stamp)).hexdigest(length=16)
    return _Head(_FORMAT, told, len(starts), digest)


def _place(stamp: Stamp) -> Path:
    return cache_folder() / "offsets" / f"{blake3(stamp[0].encode()).hexdigest(length=8)}.starts"

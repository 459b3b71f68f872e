"""A corpus, checked and readable at any position, in bounded memory.

Passages keep the file's order, which breaks ties. Lines of JSON are read where they are; a packed
corpus (.gz, parquet) is unpacked into such lines first. They are memory-mapped: each passage takes
eight bytes of memory, whatever its text holds. Of a large file of lines, `offsets` and `digests`
remember what reading it has told.
"""

import mmap
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, overload

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from retrieval_server import digests, offsets
from retrieval_server.corpus_files import SHAPE, document, files_of, is_plain, lines, rows
from retrieval_server.digests import Stamp
from retrieval_server.protocol import CorpusError, Document

Progress = Callable[[int], None]
STARTS, UNPACKED = "starts.npy", "passages.jsonl"  # in an index folder
_EVERY = 4096  # passages between two words of progress
_encoder = msgspec.json.Encoder()


class Passages(Sequence[Document]):
    """The documents of `file` (JSON lines); `starts` int64[N]: the offset of each, ascending."""

    def __init__(
        self,
        file: BinaryIO,
        starts: NDArray[np.int64],
        name: str,
        digest: str = "",
        stamp: Stamp | None = None,
    ) -> None:
        """`digest`: where it is known already. `stamp`: of a plain file, whose digest may be."""
        self.starts, self._name, self._digest, self._stamp = starts, name, digest, stamp
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, position: int) -> Document: ...

    @overload
    def __getitem__(self, position: slice) -> list[Document]: ...

    def __getitem__(self, position: int | slice) -> Document | list[Document]:
        if isinstance(position, slice):
            return [self[i] for i in range(len(self))[position]]
        begin = int(self.starts[position])
        end = self._bytes.find(b"\n", begin)
        line = self._bytes[begin:] if end < 0 else self._bytes[begin:end]
        return document(line, f"{self._name}, passage {position}")

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    def digest(self) -> str:
        """A digest of all passages and their order, as they stand in the file."""
        if not self._digest and self._stamp and _is_still(self._stamp):
            self._digest = digests.mark([Path(self._stamp[0])]).blake3
        if not self._digest:
            self._digest = blake3(self._bytes, max_threads=blake3.AUTO).hexdigest(length=16)
        return self._digest


def load_corpus(
    path: str | Path,
    unpacked: Path | None = None,
    progress: Progress = lambda passages: None,
    large_bytes: int = digests.LARGE_BYTES,
) -> Passages:
    """Read and check every passage once. Raises CorpusError naming file, line, value and remedy.

    `unpacked`: where the lines of a packed corpus are kept; else in a file that goes with the
    process. Of a plain file of `large_bytes` or more, what was found is remembered.
    """
    path = Path(path)
    files_of(path)
    with ExitStack() as stack:
        if is_plain(path):
            file: BinaryIO = stack.enter_context(path.open("rb"))
            stamp = digests.stamp(path)
            starts = _starts(path, stamp, progress, large_bytes)
            return Passages(file, starts, str(path), stamp=stamp)
        file = stack.enter_context(unpacked.open("w+b") if unpacked else _nameless())
        starts = _checked(path, _unpack(path, file), progress)
        file.flush()
        return Passages(file, starts, str(path))


def _starts(path: Path, stamp: Stamp, progress: Progress, large_bytes: int) -> NDArray[np.int64]:
    is_large = stamp[1] >= large_bytes
    if is_large and (known := offsets.remembered(stamp)) is not None:
        progress(len(known))
        return known
    starts = _checked(path, _read(path), progress)
    if is_large and _is_still(stamp):
        offsets.remember(stamp, starts)
    return starts


def _is_still(stamp: Stamp) -> bool:
    """True while the file is the one that it was."""
    try:
        return digests.stamp(Path(stamp[0])) == stamp
    except OSError:
        return False


def reopen(folder: Path, corpus: Path, digest: str = "") -> Passages:
    """The passages of an index folder, which keeps their offsets and a packed corpus' lines.

    `digest`: the corpus', where it is known.
    """
    lines = corpus if is_plain(corpus) else folder / UNPACKED
    with lines.open("rb") as file:
        return Passages(file, np.load(folder / STARTS, mmap_mode="r"), str(lines), digest)


def digest_of(documents: Sequence[Document]) -> str:
    """A digest that changes with any document or with their order."""
    if isinstance(documents, Passages):
        return documents.digest()
    digest = blake3()
    for each in documents:
        digest.update(f"\0{each.id}\0{each.contents}".encode())
    return digest.hexdigest(length=16)


def _nameless() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="forage-corpus-")


def _checked(
    path: Path, placed: Iterable[tuple[int, Document]], progress: Progress
) -> NDArray[np.int64]:
    """The offset of each passage. Raises CorpusError where there is none, or two share an id."""
    starts, ids = array("q"), array("q")
    for start, passage in placed:
        starts.append(start)
        ids.append(hash(passage.id))
        if len(starts) % _EVERY == 0:
            progress(len(starts))
    progress(len(starts))
    if not starts:
        raise CorpusError(f"{str(path)!r} holds no passages: {SHAPE}")
    _require_different(path, np.frombuffer(ids, np.int64))
    return np.frombuffer(starts, np.int64)


def _read(path: Path) -> Iterator[tuple[int, Document]]:
    for number, offset, line in lines(path):
        yield offset, document(line, f"{path}:{number}")


def _unpack(path: Path, file: BinaryIO) -> Iterator[tuple[int, Document]]:
    offset = 0
    for _, passage in rows(path):
        yield offset, passage
        offset += file.write(_encoder.encode(passage) + b"\n")


def _require_different(path: Path, ids: NDArray[np.int64]) -> None:
    """Raise CorpusError when two passages share an id. Of each id only its hash is remembered:
    where two agree, the corpus is read again for those.
    """
    ordered = np.sort(ids)
    suspected = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspected:
        return
    seen: dict[str, str] = {}
    for where, each in rows(path):
        if hash(each.id) in suspected and (first := seen.setdefault(str(each.id), where)) != where:
            raise CorpusError(
                f"{where}: id = {each.id!r}: already used at {first}; give each passage its own id"
            )

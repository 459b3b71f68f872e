"""Passages are memory-mapped: each takes eight bytes of memory, whatever its text holds."""

import mmap
from collections.abc import Iterator, Sequence
from typing import BinaryIO, overload

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from retrieval_server.protocol import Document
from retrieval_server.rows import document


class Passages(Sequence[Document]):
    """The documents of `file` (JSON lines); `starts` int64[N]: the offset of each, ascending."""

    def __init__(
        self, file: BinaryIO, starts: NDArray[np.int64], name: str, digest: str = ""
    ) -> None:
        """`digest`: where it is known already."""
        self.starts, self._name, self._digest = starts, name, digest
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
        digest = self._digest
        return digest or blake3(self._bytes, max_threads=blake3.AUTO).hexdigest(length=16)


def digest_of(documents: Sequence[Document]) -> str:
    """A digest that changes with any document or with their order."""
    if isinstance(documents, Passages):
        return documents.digest()
    digest = blake3()
    for each in documents:
        digest.update(f"\0{each.id}\0{each.contents}".encode())
    return digest.hexdigest(length=16)

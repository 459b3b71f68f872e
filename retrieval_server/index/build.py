"""Builds of index folders from a corpus (and an encoder): resumable, in bounded memory.

Encoded blocks stay encoded, whatever interrupts a build, and the blocks are always the same, so the
index is too. In memory are a block of passages, eight bytes for each passage, and the index that is
being made.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.runtime.files import Locked, draft_of, locked, replacing, write_durably
from retrieval_server import digests
from retrieval_server.corpus import STARTS, UNPACKED, Passages, load_corpus, reopen
from retrieval_server.corpus_files import files_of, is_plain
from retrieval_server.digests import Mark
from retrieval_server.encoder_settings import digest_of
from retrieval_server.index import manifest
from retrieval_server.index.kinds import Kind, room
from retrieval_server.index.manifest import EncoderMark, Manifest
from retrieval_server.protocol import BadIndex, Document

if TYPE_CHECKING:
    from retrieval_server.encoder import Encoder

Progress = Callable[[str, int, int], None]  # step, passages done, of how many (0: not known yet)
BLOCK = 1024  # passages encoded between two words of progress, and lost at most by a kill
_STATE, _EMBEDDINGS = "building.json", "embeddings.f32"


class _BuildState(msgspec.Struct, frozen=True):
    """The inputs of a folder under construction, and how many passages are encoded."""

    kind: Kind
    corpus: Mark
    encoder: EncoderMark | None
    encoded: int = 0


def build_bm25(corpus: Path, folder: Path, progress: Progress) -> Manifest:
    """A BM25 index of the corpus. Raises CorpusError, BadIndex."""
    from retrieval_server.index.bm25 import K1, VERSION, B, BM25Index

    with _Build(corpus, folder, "bm25", None, progress) as build:
        texts = (document.contents for document in build.counted("indexing"))
        BM25Index(texts).save(folder / manifest.BM25)
        files = sorted((folder / manifest.BM25).iterdir())
        return build.finish(VERSION, files, parameters={"k1": K1, "b": B})


def build_tantivy(corpus: Path, folder: Path, progress: Progress) -> Manifest:
    """An index of tantivy's BM25, whose finished segments stay. Raises CorpusError, BadIndex."""
    from retrieval_server.index import tantivy_index
    from retrieval_server.index.frequent import K1, STRETCH, B, stretches

    with _Build(corpus, folder, "tantivy", None, progress) as build:

        def texts(begin: int) -> Iterator[str]:
            return (document.contents for document in build.counted("indexing", begin))

        place, passages = folder / manifest.TANTIVY, build.passages
        sample = (
            document.contents
            for begin in stretches(len(passages))
            for document in passages[begin : begin + STRETCH]
        )
        tantivy_index.build(place, texts, len(passages), sample)
        # What it locks while it writes holds nothing.
        files = [path for path in sorted(place.iterdir()) if path.suffix != ".lock"]
        parameters = {"k1": K1, "b": B}
        return build.finish(tantivy_index.VERSION, files, parameters=parameters)


def build_dense(
    corpus: Path, folder: Path, encoder: "Encoder", factory: str, threads: int, progress: Progress
) -> Manifest:
    """A FAISS index (any factory string) of the passages' vectors. Raises CorpusError, BadIndex."""
    from retrieval_server.index import faiss_index

    told = EncoderMark(
        str(encoder.path.resolve()), digest_of(encoder.path), encoder.dimension, encoder.usage,
        encoder.dtype,
    )  # fmt: skip
    faiss_index.made(factory, encoder.dimension)  # before hours of encoding
    with _Build(corpus, folder, "dense", told, progress) as build:
        build.encode(encoder)
        count = len(build.passages)
        vectors = np.memmap(folder / _EMBEDDINGS, np.float32, "r", shape=(count, told.dimension))

        def blocks() -> Iterator[NDArray[np.float32]]:
            for begin in range(0, count, BLOCK):
                yield np.asarray(vectors[begin : begin + BLOCK])

        progress("indexing", 0, count)
        index = faiss_index.build(
            blocks,
            told.dimension,
            count,
            factory,
            threads,
            lambda done: progress("indexing", done, count),
        )
        faiss_index.write(index, folder / manifest.VECTORS)
        parameters = faiss_index.parameters(index, factory, count)
        files = [folder / manifest.VECTORS]
        return build.finish(faiss_index.VERSION, files, factory, parameters)


class _Build:
    """One folder being built, by one process at a time."""

    def __init__(
        self,
        corpus: Path,
        folder: Path,
        kind: Kind,
        encoder: EncoderMark | None,
        progress: Progress,
    ) -> None:
        self._corpus, self._folder, self._kind, self._encoder = corpus, folder, kind, encoder
        self._progress = progress

    def __enter__(self) -> "_Build":
        folder, files = self._folder, files_of(self._corpus)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(folder, "another build"))
            except Locked as error:
                raise BadIndex(
                    f"another process is building in {str(folder)!r}: wait for it"
                ) from error
            self._progress("reading the corpus", 0, 0)
            self._begin(_BuildState(self._kind, digests.mark(files), self._encoder))
            self.passages = self._open()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _begin(self, state: _BuildState) -> None:
        path, folder = self._folder / _STATE, self._folder
        if (folder / manifest.NAME).exists():
            raise BadIndex(f"{str(folder)!r} holds an index already: name another folder")
        if not path.exists():
            if any(each != draft_of(path) for each in folder.iterdir()):
                raise BadIndex(f"{str(folder)!r} is not empty: name a new folder")
            self._keep(state)
            return
        try:
            self._state = msgspec.json.decode(path.read_bytes(), type=_BuildState)
        except msgspec.DecodeError as error:
            raise BadIndex(f"{str(path)!r} cannot be read ({error}): remove the folder") from error
        if msgspec.structs.replace(self._state, encoded=0) != state:
            raise BadIndex(
                f"{str(folder)!r} holds half an index of another kind, corpus, encoder or use "
                "of it: remove it, or name another folder"
            )

    def _keep(self, state: _BuildState) -> None:
        write_durably(self._folder / _STATE, msgspec.json.encode(state))
        self._state = state

    def _open(self) -> Passages:
        starts, unpacked = self._folder / STARTS, self._folder / UNPACKED
        if not starts.exists():
            fits = room(self._kind, self._corpus)

            def progress(done: int) -> None:
                fits(done)
                self._progress("reading the corpus", done, 0)

            passages = load_corpus(self._corpus, unpacked, progress)
            with replacing(starts, durable=False) as draft, draft.open("wb") as file:
                np.save(file, passages.starts)
        return reopen(self._folder, self._corpus)

    def counted(self, step: str, begin: int = 0) -> Iterator[Document]:
        """The passages from one on, with a word of progress after every block."""
        count = len(self.passages)
        for position in range(begin, count):
            yield self.passages[position]
            if (done := position + 1) % BLOCK == 0 or done == count:
                self._progress(step, done, count)

    def encode(self, encoder: "Encoder") -> None:
        """Append the vectors of all passages to their file, from the block where it stopped."""
        count, row = len(self.passages), 4 * encoder.dimension
        with (self._folder / _EMBEDDINGS).open("ab") as file:
            there = file.seek(0, os.SEEK_END) // row
            if there < self._state.encoded:  # it was cut: whole blocks alone are taken for done
                self._keep(msgspec.structs.replace(self._state, encoded=there - there % BLOCK))
            file.truncate(self._state.encoded * row)
            while (begin := self._state.encoded) < count:
                self._progress("encoding", begin, count)
                block = self.passages[begin : begin + BLOCK]
                file.write(encoder.passages([document.contents for document in block]).tobytes())
                file.flush()
                os.fsync(file.fileno())
                self._keep(msgspec.structs.replace(self._state, encoded=begin + len(block)))
        self._progress("encoding", count, count)

    def finish(
        self,
        library: str,
        files: list[Path],
        factory: str = "",
        parameters: Mapping[str, int | float | str] = MappingProxyType({}),
    ) -> Manifest:
        """Write the manifest, and remove what only the building needed."""
        folder, packed = self._folder, not is_plain(self._corpus)
        files = [*files, folder / STARTS]
        if packed:
            files.append(folder / UNPACKED)
        made = Manifest(
            format=manifest.FORMAT,
            kind=self._kind,
            passages=len(self.passages),
            corpus_path=str(self._corpus.resolve()),
            corpus=self._state.corpus,
            library=library,
            files={str(path.relative_to(folder)): digests.mark([path]) for path in files},
            factory=factory,
            encoder=self._encoder,
            unpacked=packed,
            parameters=dict(parameters),
        )
        manifest.write(folder, made)
        for name in (_STATE, _EMBEDDINGS):
            (folder / name).unlink(missing_ok=True)
        return made

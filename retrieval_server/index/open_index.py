"""Opening of the configured passages and index, checked against each other.

Three forms: a corpus alone (BM25, made at the start), a folder of `forage index`, a FAISS file (or
its parts, as Search-R1's `part_aa`, `part_ab`) with corpus and encoder. A second index, of words,
may be fused with it, and a reranker look at what they find.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from configs.retrieval import RetrievalConfig
from retrieval_server import digests
from retrieval_server.corpus import load_corpus, reopen
from retrieval_server.encoder_settings import digest_of, require_encoder
from retrieval_server.index import manifest
from retrieval_server.index.base import Index
from retrieval_server.index.kinds import require_named, room
from retrieval_server.index.manifest import BM25, PARTS, TANTIVY, VECTORS, Manifest
from retrieval_server.protocol import BadIndex, Document

logger = logging.getLogger("retrieval_server")
_FAISS = b"I"  # the first letter of every kind of index in FAISS's files
# FAISS tells, when it is imported, which instruction sets it looked for.
logging.getLogger("faiss").setLevel(logging.WARNING)


def open_index(asked: RetrievalConfig) -> tuple[Sequence[Document], Index]:
    """The passages and index that `asked` names. Raises CorpusError, BadIndex naming the field."""
    passages, index = _opened(asked)
    if asked.word_index:
        from retrieval_server.index.hybrid import Hybrid

        told = _check_words(asked)
        index = Hybrid([_of_words(Path(asked.word_index), told), index])
    if asked.reranker:
        from retrieval_server.index.rerank import CrossEncoder, Reranked

        encoder = CrossEncoder(Path(asked.reranker), asked.encoder_dtype, asked.device)
        index = Reranked(index, passages, encoder, asked.rerank_candidates)
    return passages, index


def _opened(asked: RetrievalConfig) -> tuple[Sequence[Document], Index]:
    """The passages, and what `retrieval.index` names."""
    if not asked.index:
        require_named(asked, "bm25")
        from retrieval_server.index.bm25 import BM25Index

        passages = load_corpus(asked.corpus, progress=room("bm25", asked.corpus))
        return passages, BM25Index(document.contents for document in passages)
    folder = Path(asked.index)
    if parts := _bare(asked):
        _require_sources(asked)
        passages = load_corpus(asked.corpus)
        logger.warning("%s says nothing of its encoder or corpus: they are taken as given", folder)
        return passages, _dense(asked, parts, Path(asked.encoder), None, len(passages))
    told = check(asked)
    passages = reopen(folder, _corpus(asked, told), told.corpus.blake3)
    if told.kind != "dense":
        return passages, _of_words(folder, told)
    from retrieval_server.index import faiss_index

    _compare(told, faiss_index.VERSION)
    path = _encoder(asked, told)
    return passages, _dense(asked, [folder / VECTORS], path, told, len(passages))


def _of_words(folder: Path, told: Manifest) -> Index:
    if told.kind == "bm25":
        from retrieval_server.index.bm25 import VERSION, BM25Index

        _compare(told, VERSION)
        return BM25Index.load(folder / BM25)
    from retrieval_server.index import tantivy_index

    _compare(told, tantivy_index.VERSION)
    return tantivy_index.TantivyIndex(folder / TANTIVY)


def check(asked: RetrievalConfig) -> Manifest:
    """The manifest of the folder `asked.index`, its files, corpus and encoder being what they were
    when it was built. Raises BadIndex, CorpusError.
    """
    folder = Path(asked.index)
    told = manifest.read(folder)
    require_named(asked, told.kind)
    manifest.check(folder, told, _corpus(asked, told))
    if told.encoder:
        path = _encoder(asked, told)
        require_encoder(path)
        if digest_of(path) != told.encoder.digest:
            raise BadIndex(
                f"the index {str(folder)!r} was built with the encoder {told.encoder.path!r}, and "
                f"{str(path)!r} is another: name that one (retrieval.encoder), or build again"
            )
    return told


def _check_words(asked: RetrievalConfig) -> Manifest:
    """The manifest of `asked.word_index`, which is of the same corpus. Raises BadIndex."""
    folder = Path(asked.word_index)
    told = manifest.read(folder)
    require_named(asked, told.kind, "word_index")
    corpus = asked.corpus or manifest.read(Path(asked.index)).corpus_path
    manifest.check(folder, told, Path(corpus))
    return told


def look(asked: RetrievalConfig) -> None:
    """Raise CorpusError or BadIndex for what cannot be served; no model or vector is loaded."""
    if not asked.index:
        require_named(asked, "bm25")
        load_corpus(asked.corpus, progress=room("bm25", asked.corpus))
    elif _bare(asked):
        _require_sources(asked)
        require_encoder(Path(asked.encoder))
        load_corpus(asked.corpus)
    else:
        check(asked)
    if asked.word_index:
        _check_words(asked)
    if asked.reranker:
        require_encoder(Path(asked.reranker), "retrieval.reranker")


def _compare(told: Manifest, library: str) -> None:
    """Say so when another version wrote the index: it should be read, but was not tried."""
    if told.library != library:
        logger.warning("the index was built by %s and is read by %s", told.library, library)


def _bare(asked: RetrievalConfig) -> list[Path]:
    """The FAISS file, or its parts in order; empty for a folder of ours."""
    path = Path(asked.index)
    if path.is_dir():
        return [] if (path / manifest.NAME).exists() else sorted(path.glob(PARTS))
    if not path.exists():
        raise BadIndex(
            f"{str(path)!r} does not exist: name an index folder or a FAISS file, or make it: "
            f"forage index {asked.corpus or 'CORPUS'} {path}"
        )
    with path.open("rb") as file:
        if file.read(1) != _FAISS:
            raise BadIndex(
                f"{str(path)!r} is no FAISS file: name one, or a folder of forage index; passages "
                "are retrieval.corpus"
            )
    return [path]


def _require_sources(asked: RetrievalConfig) -> None:
    require_named(asked, "dense")
    for field in ("corpus", "encoder"):
        if not getattr(asked, field):
            raise BadIndex(
                f"{asked.index!r} is a FAISS file, which does not say what it was built from: name "
                f"its {field} (retrieval.{field})"
            )


def _corpus(asked: RetrievalConfig, told: Manifest) -> Path:
    return Path(asked.corpus or told.corpus_path)


def _encoder(asked: RetrievalConfig, told: Manifest) -> Path:
    return Path(asked.encoder or (told.encoder.path if told.encoder else ""))


def _has_two_places(asked: RetrievalConfig) -> bool:
    """True where an encoder and an index do not take each other's processors."""
    cores = os.cpu_count() or 1
    return "cuda" in (asked.device, asked.index_device) or 2 * asked.threads <= cores


def _dense(
    asked: RetrievalConfig, files: list[Path], path: Path, told: Manifest | None, count: int
) -> Index:
    import torch

    from retrieval_server.encoder import Encoder
    from retrieval_server.index import faiss_index

    torch.set_num_threads(asked.threads)
    vectors = faiss_index.read(files, asked.map_index)
    if vectors.ntotal != count:
        raise BadIndex(
            f"{asked.index!r} holds {vectors.ntotal} vectors, and {asked.corpus!r} {count} "
            "passages: name the corpus that the index was built from"
        )
    built = told.encoder if told else None
    if built and built.dtype != asked.encoder_dtype:
        logger.warning(
            "passages were encoded in %s, queries are in %s (retrieval.encoder_dtype)",
            built.dtype,
            asked.encoder_dtype,
        )
    encoder = Encoder(path, built.usage if built else None, asked.encoder_dtype, asked.device)
    mark = told.files[VECTORS] if told else digests.mark(files)
    decisive = (mark, encoder.usage, asked.encoder_dtype, asked.device, asked.index_device)
    return faiss_index.DenseIndex(
        vectors,
        encoder,
        asked.ef_search,
        asked.nprobe,
        asked.threads,
        gpus=asked.index_device == "cuda",
        overlapped=_has_two_places(asked),
        fingerprint=blake3(msgspec.json.encode(decisive)).hexdigest(length=8),
    )

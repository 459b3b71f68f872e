"""Kinds of index: how many passages each takes, and what a configuration must say of them.

Rankers are never exchanged in silence: tantivy's BM25 is searched where `retrieval.kind` names it,
and no other index than the kind that is named.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from configs.retrieval import RetrievalConfig
from retrieval_server.protocol import BadIndex, CorpusError

Kind = Literal["bm25", "tantivy", "dense"]
MOST_PASSAGES = {
    "bm25": 5_000_000,  # at 3 to 4 kB of memory each while it is built; 40 ms of search and more
    "tantivy": 28_000_000,  # in 7 segments, none of which may fill its arena
}
_OTHER = {
    "bm25": "build tantivy's, which ranks otherwise: forage index {} OUT --kind tantivy",
    "tantivy": "leave some out, or build a dense index: forage index {} OUT --encoder MODEL",
}


def room(kind: Kind, corpus: str | Path) -> Callable[[int], None]:
    """A function that is told how many passages a corpus has, or has so far. It raises CorpusError
    once they are more than the kind takes.
    """
    most = MOST_PASSAGES.get(kind)

    def check(passages: int) -> None:
        if most is not None and passages > most:
            raise CorpusError(
                f"{str(corpus)!r} holds more passages than an index of kind {kind!r} takes, "
                f"{most:,}: {_OTHER[kind].format(corpus)}"
            )

    return check


def require_named(asked: RetrievalConfig, kind: Kind, field: str = "index") -> None:
    """Raise BadIndex unless `retrieval.kind` lets an index of this kind be searched, that `field`
    names.
    """
    words, _, vectors = asked.kind.rpartition("+")
    wanted = words if field == "word_index" else vectors
    if wanted == kind or (not wanted and kind != "tantivy"):
        return
    path = getattr(asked, field)
    if not asked.index:
        how = f"--kind {asked.kind}" if asked.kind == "tantivy" else "--encoder MODEL"
        raise BadIndex(
            f"retrieval.kind = {asked.kind!r} is searched in an index alone: build one, forage "
            f"index {asked.corpus or 'CORPUS'} OUT {how}, and name it: retrieval.index=OUT"
        )
    if not asked.kind:
        raise BadIndex(
            f"{asked.index!r} is an index of tantivy's BM25, which ranks otherwise than bm25: say "
            "that it is meant, retrieval.kind=tantivy"
        )
    meant = "" if asked.word_index else f", or say retrieval.kind={kind}"
    if field == "word_index" and kind != "dense":
        meant = f", or say retrieval.kind={kind}+{vectors}"
    raise BadIndex(
        f"{path!r} is an index of kind {kind!r}, and retrieval.kind = {asked.kind!r}: name another "
        f"one (retrieval.{field}){meant}"
    )

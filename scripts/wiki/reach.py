"""The reach of searches: is what a question needs among the passages that its searches bring?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from configs.retrieval import RetrievalConfig
from retrieval_server.index.base import Index
from retrieval_server.index.open_index import open_index
from retrieval_server.protocol import Document
from scripts.command.terminal import Bars
from scripts.wiki.questions import KINDS, Question

TOP_K = 3  # as configs/schema.py has it for retrieval.top_k
_BATCH = 64


@dataclass(frozen=True)
class Searcher:
    """A corpus and its index, searched without a server."""

    passages: Sequence[Document]
    index: Index

    @classmethod
    def open(cls, corpus: Path, index: Path) -> "Searcher":
        """Raises CorpusError, BadIndex."""
        return cls(*open_index(RetrievalConfig(corpus=str(corpus), index=str(index))))

    def search(self, queries: Iterable[str], what: str) -> dict[str, list[Document]]:
        """The first TOP_K passages of each query, best first; shown as `what`."""
        wanted = list(dict.fromkeys(queries))
        found: dict[str, list[Document]] = {}
        bars = Bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with bars:
            task = bars.add_task(what, total=len(wanted))
            for start in range(0, len(wanted), _BATCH):
                batch = wanted[start : start + _BATCH]
                for query, hits in zip(batch, self.index.search(batch, TOP_K), strict=True):
                    found[query] = [self.passages[hit.position] for hit in hits]
                bars.update(task, completed=start + len(batch))
        return found


def ranks(question: Question, found: dict[str, list[Document]]) -> list[int]:
    """The rank of what each search is to bring, from 1; 0 where it is not among them."""
    ids = [[str(each.id) for each in found[hop.query]] for hop in question.hops]
    return [
        brought.index(hop.passage) + 1 if hop.passage in brought else 0
        for hop, brought in zip(question.hops, ids, strict=True)
    ]


def audit(
    questions: Iterable[Question], found: dict[str, list[Document]]
) -> dict[str, dict[str, float]]:
    """Of each kind: how many questions, and which share has all that it needs among the first
    TOP_K passages of its searches (`reached`), or of the question itself as the only search
    (`asked`).
    """
    by_kind: dict[str, list[Question]] = {kind: [] for kind in KINDS}
    for question in questions:
        by_kind[question.kind].append(question)
    return {
        kind: {
            "questions": len(each),
            "reached": _share(all(ranks(q, found)) for q in each),
            "asked": _share(_asked(q, found) for q in each),
        }
        for kind, each in by_kind.items()
        if each
    }


def _asked(question: Question, found: dict[str, list[Document]]) -> bool:
    return {str(each.id) for each in found[question.text]}.issuperset(question.support)


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return round(sum(values) / len(values), 3)

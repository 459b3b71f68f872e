"""How far the answers of questions are within reach: anywhere in the corpus, and in what a search
for the question brings.

Consumes questions, passages and their index; produces plain numbers. Each question is searched for
once, then the passages are read once, in their order. Waits for nothing but the disk. Memory: the
index's own, and the hits of each question as numbers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from configs.load import ConfigError
from configs.schema import Config
from replay.question_files import QuestionsError, read_questions
from replay.trajectory import Kind
from retrieval_server.index import Index
from retrieval_server.protocol import Document
from scripts.audit_answers import Answers
from scripts.audit_searches import Asked, Brought, RecordedSearches

DEPTHS = (1, 3, 10, 100)  # and retrieval.top_k
BATCH = 64  # queries in one call of the index
KINDS: tuple[Kind, ...] = ("train", "eval")
Hits = NDArray[np.int32]  # [H, 3]: position, question and rank, ascending by position
Figures = dict[str, Any]  # of the questions of one file


class Reach:
    """One corpus, searched and read once for many questions."""

    def __init__(
        self, questions: Sequence[Asked], passages: Sequence[Document], index: Index, top_k: int
    ) -> None:
        self.questions, self._passages, self._index = questions, passages, index
        self._answers = Answers(question for _, question in questions)
        self._depths = sorted({*DEPTHS, top_k} - {0})

    def measure(
        self, progress: Progress, searches: RecordedSearches | None = None
    ) -> dict[Kind, Figures]:
        """Search, read and count; the figures of each file that has questions."""
        hits = self._search(progress)
        anywhere, ranks = self._read(hits, searches, progress)
        counts = searches.count() if searches else {}
        kinds = dict.fromkeys(kind for kind, _ in self.questions)
        return {kind: self._figures(kind, anywhere, ranks, counts.get(kind)) for kind in kinds}

    def _search(self, progress: Progress) -> Hits:
        depth = min(self._depths[-1], len(self._passages))
        rows: list[Hits] = []
        starts = range(0, len(self.questions), BATCH)
        for start in progress.track(starts, description="searching for the questions"):
            queries = [each.text.strip() for _, each in self.questions[start : start + BATCH]]
            for number, found in enumerate(self._index.search(queries, depth), start):
                places = [(hit.position, number, rank) for rank, hit in enumerate(found)]
                rows.append(np.array(places, np.int32).reshape(-1, 3))
        hits = np.concatenate(rows)
        ordered: Hits = hits[np.argsort(hits[:, 0], kind="stable")]
        return ordered

    def _read(
        self, hits: Hits, searches: RecordedSearches | None, progress: Progress
    ) -> tuple[set[str], NDArray[np.int32]]:
        """The answers that the corpus holds, and int32[Q]: the rank of the first hit that holds an
        answer to each question; the greatest depth where none does.
        """
        anywhere: set[str] = set()
        of = self._answers.of
        ranks = np.full(len(self.questions), self._depths[-1], np.int32)
        groups = _by_position(hits)
        next_hit, rows = next(groups, (-1, hits[:0]))
        passages = progress.track(self._passages, description="reading the corpus")
        for position, passage in enumerate(passages):
            found = self._answers.found_in(passage.contents)
            anywhere |= found
            if position == next_hit:
                for _, number, rank in rows.tolist() if found else ():
                    if rank < ranks[number] and not found.isdisjoint(of[number]):
                        ranks[number] = rank
                next_hit, rows = next(groups, (-1, rows))
            if searches:
                searches.look(str(passage.id), found, of)
        return anywhere, ranks

    def _figures(
        self, kind: Kind, anywhere: set[str], ranks: NDArray[np.int32], brought: Brought | None
    ) -> Figures:
        numbers = [n for n, (each, _) in enumerate(self.questions) if each == kind]
        missing = [n for n in numbers if anywhere.isdisjoint(self._answers.of[n])]
        figures: Figures = {
            "questions": len(numbers),
            "with_answers": sum(bool(self._answers.of[n]) for n in numbers),
            "anywhere": len(numbers) - len(missing),
            "top": {str(k): int((ranks[numbers] < k).sum()) for k in self._depths},
            "missing": [self.questions[n][1].id for n in missing],
        }
        if brought:
            names = ("questions", "rollouts", "searches")
            figures["recorded"] = {
                name: {"made": brought.made[name], "answered": brought.answered[name]}
                for name in names
            }
        return figures


def questions_of(config: Config) -> list[Asked]:
    """The questions of both files. Raises ConfigError when none is named."""
    files = config.questions
    if not files.train and not files.eval:
        raise ConfigError("questions.train and questions.eval are empty: name a file of questions")
    made: list[Asked] = []
    limits = {"train": 0, "eval": files.eval_limit}
    for kind in KINDS:
        path = getattr(files, kind)
        try:
            found = read_questions(path, limits[kind]).questions if path else ()
        except QuestionsError as error:
            raise ConfigError(f"questions.{kind} = {path!r}: {error}") from error
        made += ((kind, each) for each in found)
    return made


def _by_position(hits: Hits) -> Iterator[tuple[int, Hits]]:
    positions, starts = np.unique(hits[:, 0], return_index=True)
    ends = [*starts[1:].tolist(), len(hits)]
    for position, start, end in zip(positions.tolist(), starts.tolist(), ends, strict=True):
        yield position, hits[start:end]

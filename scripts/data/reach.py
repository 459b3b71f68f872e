"""The reach of answers: in the corpus, in the top passages of a search, in a run's searches.

Each question is searched for once, then the passages are read once, in order; a run's event log is
read twice: for the passages to look for, then to count. Memory: the index's own, the hits as
numbers, and each passage brought once a question. Answer and text go through the reward's
normalisation (`actors.answers`) and are compared word by word: the words of an answer must follow
one another in the text, each of them whole. So "rome" is not in "romeo", nor in "rome’s". An answer
of which nothing is left cannot be found.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from actors.answers import normalize_answer
from configs.load import ConfigError
from configs.schema import Config
from replay.log.history import Searched, SearchLog
from replay.question_files import QuestionsError
from replay.questions import questions_of as of_run
from replay.trajectory import Kind, Question, Search
from retrieval_server.index.base import Index
from retrieval_server.protocol import Document

Asked = tuple[Kind, Question]
DEPTHS = (1, 3, 10, 100)  # and retrieval.top_k
BATCH = 64  # queries in one call of the index
KINDS: tuple[Kind, ...] = ("train", "eval")
Hits = NDArray[np.int32]  # [H, 3]: position, question and rank, ascending by position
Figures = dict[str, Any]  # of the questions of one file


class Answers:
    """The normalised answers of questions, to be looked for in one text after the other."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.of = [
            frozenset(filter(None, map(normalize_answer, question.answers)))
            for question in questions
        ]
        self._all = frozenset().union(*self.of)
        lengths: dict[str, set[int]] = {}
        for answer in self._all:
            first, *rest = answer.split()
            lengths.setdefault(first, set()).add(1 + len(rest))
        self._lengths = {first: tuple(sorted(each)) for first, each in lengths.items()}

    def found_in(self, text: str) -> set[str]:
        """The normalised answers in a text; `of[n]` are those of question n."""
        words = normalize_answer(text).split()
        found = set()
        for at, word in enumerate(words):
            for length in self._lengths.get(word, ()):
                answer = word if length == 1 else " ".join(words[at : at + length])
                if answer in self._all:
                    found.add(answer)
        return found


@dataclass
class Brought:
    """Questions, rollouts and searches on record; `answered`: a passage held an answer."""

    made: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)


class RecordedSearches:
    """The searches that a run made for these questions."""

    def __init__(self, run: Path, questions: Sequence[Asked]) -> None:
        """Reads the log once. Raises LogError, CodecError."""
        self._log, self._questions = SearchLog(run), questions
        self._numbers = {(kind, each.id): n for n, (kind, each) in enumerate(questions)}
        self._wanted: dict[str, set[int]] = {}  # the questions that a passage was brought for
        self._holding: set[tuple[str, int]] = set()
        self.strangers = 0  # rollouts of other questions
        for rollout in self._log.rollouts():
            if (number := self._number(rollout)) is None:
                self.strangers += 1
                continue
            for search in _searches(rollout):
                for id in search.passage_ids:
                    self._wanted.setdefault(id, set()).add(number)
        self.compacted = self._log.compacted
        self.of_failed = sum(len(each.searches) for each in self._log.failed())
        self._missing = set(self._wanted)

    @property
    def missing(self) -> list[str]:
        """The passages that were brought, but have not been seen in the corpus."""
        return sorted(self._missing)

    def look(self, id: str, found: set[str], answers: Sequence[frozenset[str]]) -> None:
        """Note a passage of the corpus: the answers found in it, and those of each question."""
        if id in self._wanted:
            self._missing.discard(id)
            for number in self._wanted[id]:
                if not found.isdisjoint(answers[number]):
                    self._holding.add((id, number))

    def count(self) -> dict[Kind, Brought]:
        """Read the log again and count. Raises LogError, CodecError."""
        counts: dict[Kind, Brought] = {"train": Brought(), "eval": Brought()}
        answered: dict[int, bool] = {}
        for rollout in self._log.rollouts():
            if (number := self._number(rollout)) is None:
                continue
            holds = [
                any((id, number) in self._holding for id in search.passage_ids)
                for search in _searches(rollout)
            ]
            count = counts[rollout.kind]
            count.made.update(rollouts=1, searches=len(holds))
            count.answered.update(rollouts=any(holds), searches=sum(holds))
            answered[number] = answered.get(number, False) or any(holds)
        for number, holds_one in answered.items():
            count = counts[self._questions[number][0]]
            count.made.update(questions=1)
            count.answered.update(questions=holds_one)
        return counts

    def _number(self, rollout: Searched) -> int | None:
        """The question's place, if it is the same one."""
        number = self._numbers.get((rollout.kind, rollout.question.id))
        same = number is not None and self._questions[number][1] == rollout.question
        return number if same else None


def _searches(rollout: Searched) -> Iterator[Search]:
    return (each for turn in rollout.turns for each in turn if each.status != "skipped")


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
        """Search, read and count; return the figures of each file that has questions."""
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
        """The answers in the corpus; int32[Q]: rank of the first hit that answers, or the depth."""
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
    """Read the questions of both files. Raises ConfigError when none is named."""
    files = config.questions
    if not files.train and not files.eval:
        raise ConfigError("questions.train and questions.eval are empty: name a file of questions")
    made: list[Asked] = []
    for kind in KINDS:
        path = getattr(files, kind)
        try:
            found = of_run(config, kind).questions if path else ()
        except QuestionsError as error:
            wrong = str(error).removeprefix(f"{path}: ")
            raise ConfigError(f"questions.{kind} = {path!r}: {wrong}") from error
        made += ((kind, each) for each in found)
    return made


def eval_in_train(questions: Iterable[Asked]) -> int:
    """How many eval questions are also in train: the same text, normalised as answers are."""
    texts: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    for kind, question in questions:
        texts[kind].append(normalize_answer(question.text))
    trained = frozenset(texts["train"])
    return sum(text in trained for text in texts["eval"])


def _by_position(hits: Hits) -> Iterator[tuple[int, Hits]]:
    positions, starts = np.unique(hits[:, 0], return_index=True)
    ends = np.append(starts, len(hits))[1:].tolist()
    for position, start, end in zip(positions.tolist(), starts.tolist(), ends, strict=True):
        yield position, hits[start:end]

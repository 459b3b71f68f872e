"""What the searches on record in a run brought: passages with an answer, or without one.

Consumes a run's event log, twice: first for the passages to look at, then to count; between the
two, whoever reads the corpus says which answers each passage holds. Produces plain numbers. Waits
for nothing. Remembers each passage that was brought once for each question it was brought for.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from replay.searches import Searched, SearchLog
from replay.trajectory import Kind, Question, Search

Asked = tuple[Kind, Question]


@dataclass
class Brought:
    """Questions, rollouts and searches on record (`made`), and those of them with a passage that
    holds an answer (`answered`).
    """

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
        """Take in a passage of the corpus: the answers found in it, and those of each question."""
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

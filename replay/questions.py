"""The supply of questions: a file's, cycled for ever, reshuffled per epoch by the seed.

Its state is the number of draws, the questions put back and those retired, so a fold over the log
restores it.
"""

import random
from collections import deque
from collections.abc import Sequence

from replay.trajectory import Question


class Questions:
    """An endless supply: put-back questions first, then the epoch's order, without the retired.

    `cursor` counts the draws, retired questions passed over included.
    """

    def __init__(self, questions: Sequence[Question], seed: int) -> None:
        """`questions` must not be empty (ValueError)."""
        if not questions:
            raise ValueError(f"Questions needs at least one question, got {questions!r}")
        self._questions = tuple(questions)
        self._seed = seed
        self._order: list[int] = []
        self._epoch = -1
        self._requeued: deque[Question] = deque()
        self._retired: set[str] = set()
        self.cursor = 0

    def peek(self) -> Question | None:
        """Return the question that `next` will return; None when all are retired."""
        if self._requeued:
            return self._requeued[0]
        if len(self._retired) == len(self._questions):
            return None
        return self._at(self._next_draw())

    def first(self) -> Question:
        """Return the question that `next` will return. Raises LookupError when all are retired."""
        question = self.peek()
        if question is None:
            raise LookupError(f"all {len(self._questions)} questions are retired")
        return question

    def next(self) -> Question:
        """Take the next question. Raises LookupError when all are retired."""
        question = self.first()
        if self._requeued:
            self._requeued.popleft()
        else:
            self.cursor = self._next_draw() + 1
        return question

    def requeue(self, question: Question) -> None:
        """Put a question back: it comes before any new one, unless it is retired."""
        if question.id not in self._retired:
            self._requeued.append(question)

    def retire(self, question_id: str) -> None:
        """Ask this question no more."""
        self._retired.add(question_id)
        self._requeued = deque(q for q in self._requeued if q.id != question_id)

    @property
    def retired(self) -> frozenset[str]:
        """Ids of the questions asked no more."""
        return frozenset(self._retired)

    def _next_draw(self) -> int:
        draw = self.cursor
        while self._at(draw).id in self._retired:
            draw += 1
        return draw

    def _at(self, draw: int) -> Question:
        epoch, index = divmod(draw, len(self._questions))
        if epoch != self._epoch:
            self._order = list(range(len(self._questions)))
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._questions[self._order[index]]

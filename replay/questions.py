"""The questions of a run: their files, and the supply that cycles them for ever, reshuffled per
epoch by the seed.

The supply's state is the number of draws, the questions put back and those retired, so a fold over
the log restores it. Files are JSONL or parquet of ours, FlashRAG's and ASearcher's JSONL,
Search-R1's and verl's parquet, as they are; `questions.columns` names the columns of others.
"""

import hashlib
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from configs.schema import Config, QuestionColumns
from replay.question_files import NoQuestion, QuestionsError, question_rows
from replay.rows import WANTED_ROW, question_of
from replay.trajectory import Kind, Question

FIELDS: tuple[Kind, ...] = ("train", "eval")
NAMED_ROWS = 20  # of those that cannot be used
UNNAMED_SET = "other"  # of questions that name no data set, where others do
MOST_SETS = 64  # of an evaluation: each has gauges and curves of its own
_KNOWN = QuestionColumns()  # none is named


class Supply(msgspec.Struct, frozen=True):
    """How far a supply of questions is: all that the records have changed of it."""

    cursor: int
    requeued: tuple[Question, ...]
    retired: tuple[str, ...]


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
        self._draw: int | None = None  # the next, once it has been looked for
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
            self._draw = None
        return question

    def requeue(self, question: Question) -> None:
        """Put a question back: it comes before any new one, unless it is retired."""
        if question.id not in self._retired:
            self._requeued.append(question)

    def retire(self, question_id: str) -> None:
        """Ask this question no more."""
        self._retired.add(question_id)
        self._draw = None
        self._requeued = deque(q for q in self._requeued if q.id != question_id)

    @property
    def retired(self) -> frozenset[str]:
        """Ids of the questions asked no more."""
        return frozenset(self._retired)

    @property
    def retired_count(self) -> int:
        """How many questions are asked no more."""
        return len(self._retired)

    @property
    def supply(self) -> Supply:
        """How far it is."""
        return Supply(self.cursor, tuple(self._requeued), tuple(sorted(self._retired)))

    @supply.setter
    def supply(self, known: Supply) -> None:
        self.cursor, self._draw = known.cursor, None
        self._requeued, self._retired = deque(known.requeued), set(known.retired)

    @cached_property
    def digest(self) -> bytes:
        """What tells these questions, their order and the seed from any others."""
        found = hashlib.sha256(str(self._seed).encode())
        for question in self._questions:
            found.update(msgspec.msgpack.encode(question))
        return found.digest()

    def _next_draw(self) -> int:
        if self._draw is None:  # the draws beyond may be of another epoch, which takes a shuffle
            draw = self.cursor
            while self._at(draw).id in self._retired:
                draw += 1
            self._draw = draw
        return self._draw

    def _at(self, draw: int) -> Question:
        epoch, index = divmod(draw, len(self._questions))
        if epoch != self._epoch:
            self._order = list(range(len(self._questions)))
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._questions[self._order[index]]


@dataclass(frozen=True)
class QuestionFile:
    """The questions of a file's sound rows, in its order.

    `unusable`: how many rows are not sound; `faults`: what is wrong with the first of them.
    """

    questions: tuple[Question, ...]
    unusable: int = 0
    faults: tuple[str, ...] = ()

    def told(self) -> str:
        """Say how many rows cannot be used, and why not the first; '' where all can."""
        if not self.unusable:
            return ""
        others = f" (and {self.unusable - 1:,} more)" if self.unusable > 1 else ""
        rows = self.unusable + len(self.questions)
        return f"{self.unusable:,} of {rows:,} rows cannot be used: {self.faults[0]}{others}"


def questions_of(config: Config, field: Kind) -> QuestionFile:
    """Read the questions of a run's file. Those of train may lack answers where no part of the
    reward asks for them; evaluations always do. Raises QuestionsError.
    """
    files = config.questions
    if field == "eval":
        read = read_questions(files.eval, columns=files.columns, of_each=files.eval_limit)
        if (count := len({question.source for question in read.questions})) > MOST_SETS:
            raise QuestionsError(
                f"{files.eval}: its rows name {count:,} data sets, and an evaluation tells at most "
                f"{MOST_SETS} apart: leave some out, or name another column: "
                "questions.columns.source=…"
            )
        return read
    need = config.rewards.need_answers
    return read_questions(files.train, columns=files.columns, need_answers=need)


def load_questions(
    path: str | Path, limit: int = 0, columns: QuestionColumns = _KNOWN
) -> tuple[Question, ...]:
    """Return the questions of every row, or of the first `limit`; 0 reads all. Raises
    QuestionsError, for a single row that cannot be used too.
    """
    file = read_questions(path, limit, columns)
    if file.unusable:
        raise QuestionsError(
            f"{file.told()}: forage data prepare lists such rows and keeps the others"
        )
    return file.questions


def read_questions(
    path: str | Path,
    limit: int = 0,
    columns: QuestionColumns = _KNOWN,
    need_answers: bool = True,
    of_each: int = 0,
) -> QuestionFile:
    """Read and check every row, or up to the first `limit` sound ones, or the first `of_each` of
    each data set; 0 reads all.

    A row without an id is called `<file stem>-<row number>`, from 1. Raises QuestionsError where
    two rows have one id, and where more rows cannot be used than can.
    """
    path, seen, faults = Path(path), dict[str, int](), list[QuestionsError]()
    questions, taken, unusable = list[Question](), Counter[str](), 0

    def refuse(_: int, fault: QuestionsError) -> None:
        nonlocal unusable
        unusable += 1
        faults.extend([fault] if unusable <= NAMED_ROWS else [])

    for number, raw in question_rows(path, refuse):
        try:
            names = f"{path}:{number}", f"{path.stem}-{number}"
            question = question_of(raw, *names, columns, need_answers)
        except QuestionsError as fault:
            refuse(number, fault)
            continue
        if question.id in seen:
            lines = f"{path}:{number}: id {question.id!r} is that of line {seen[question.id]} too"
            raise QuestionsError(f"{lines}; give each row its own id or leave id out")
        seen[question.id] = number
        if of_each and taken[question.source] == of_each:
            continue
        taken[question.source] += 1
        questions.append(question)
        if len(questions) == limit:
            break
    file = QuestionFile(tuple(questions), unusable, tuple(map(str, faults)))
    return _usable(path, file, len(seen), faults)


def _usable(
    path: Path, file: QuestionFile, sound: int, faults: Sequence[QuestionsError]
) -> QuestionFile:
    if file.unusable > sound:
        raise QuestionsError(f"{file.told()}{_remedy(faults[0])}")
    if not file.questions:
        raise QuestionsError(f"{path}: no questions; {WANTED_ROW}")
    return file


def _remedy(fault: QuestionsError) -> str:
    """What else to do about a file that begins with this fault; '' where its row is a question."""
    if not isinstance(fault, NoQuestion):
        return ""
    wanted = "" if WANTED_ROW in str(fault) else f"; {WANTED_ROW}"
    return f": name a file of questions{wanted}"


def sets_of(questions: Sequence[Question]) -> dict[str, list[Question]]:
    """Return the questions of each data set, by its name, in order; those that name none are a set
    of their own (`UNNAMED_SET`). None where no question names one.
    """
    sets: dict[str, list[Question]] = {}
    for question in questions:
        sets.setdefault(question.source or UNNAMED_SET, []).append(question)
    return sets if any(question.source for question in questions) else {}


def left_out(config: Config) -> Iterator[str]:
    """Say of each file of a run whose rows cannot all be used how many, and why not the first."""
    for field in FIELDS:
        path = getattr(config.questions, field)
        if path and (told := questions_of(config, field).told()):
            yield (
                f"questions.{field}: left out, {told}; leave the file as it is while this run may "
                "be resumed"
            )

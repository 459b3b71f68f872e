"""The questions of a run: their files, and the supply that cycles them for ever, reshuffled per
epoch by the seed.

The supply's state is the number of draws, the questions put back and those retired, so a fold over
the log restores it. Files are JSONL or parquet of ours, FlashRAG's and ASearcher's JSONL,
Search-R1's and verl's parquet, as they are; `questions.columns` names the columns of others.
"""

import hashlib
import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from configs.schema import Config, QuestionColumns
from replay.question_files import NoQuestion, QuestionsError, question_rows
from replay.trajectory import Kind, Question

FIELDS: tuple[Kind, ...] = ("train", "eval")
NAMED_ROWS = 20  # of those that cannot be used
MAX_EXTRA_CHARS = 1 << 16  # it goes with each lease, and into the log with each group
_WANTED = (
    'write {"question": text, "answers": [text, …]}, optional "id" and "hops", or name the '
    "columns: questions.columns.question=…"
)
_LACKS = re.compile(r"missing required field `(\w+)`")
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


class _Row(msgspec.Struct):
    question: str
    answers: list[str]
    id: str | int | None = None
    hops: int = 0


def questions_of(config: Config, field: Kind) -> QuestionFile:
    """Read the questions of a run's file. Those of train may lack answers where no part of the
    reward asks for them; evaluations always do. Raises QuestionsError.
    """
    files = config.questions
    if field == "eval":
        return read_questions(files.eval, files.eval_limit, files.columns)
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
    path: str | Path, limit: int = 0, columns: QuestionColumns = _KNOWN, need_answers: bool = True
) -> QuestionFile:
    """Read and check every row, or up to the first `limit` sound ones; 0 reads all.

    A row without an id is called `<file stem>-<row number>`, from 1. Raises QuestionsError where
    two rows have one id, and where more rows cannot be used than can.
    """
    path, seen, faults = Path(path), dict[str, int](), list[QuestionsError]()
    questions, unusable = list[Question](), 0

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
            raise QuestionsError(
                f"{path}:{number}: id {question.id!r} is that of line {seen[question.id]} too; "
                "give each row its own id or leave id out"
            )
        seen[question.id] = number
        questions.append(question)
        if len(questions) == limit:
            break
    file = QuestionFile(tuple(questions), unusable, tuple(map(str, faults)))
    if unusable > len(questions):
        raise QuestionsError(f"{file.told()}{_remedy(faults[0])}")
    if not questions:
        raise QuestionsError(f"{path}: no questions; {_WANTED}")
    return file


def _remedy(fault: QuestionsError) -> str:
    """What else to do about a file that begins with this fault; '' where its row is a question."""
    if not isinstance(fault, NoQuestion):
        return ""
    wanted = "" if _WANTED in str(fault) else f"; {_WANTED}"
    return f": name a file of questions{wanted}"


def left_out(config: Config) -> Iterator[str]:
    """Say of each file of a run whose rows cannot all be used how many, and why not the first."""
    for field in FIELDS:
        path = getattr(config.questions, field)
        if path and (told := questions_of(config, field).told()):
            yield (
                f"questions.{field}: left out, {told}; leave the file as it is while this run may "
                "be resumed"
            )


def question_of(
    raw: Any,
    where: str,
    name: str,
    columns: QuestionColumns = _KNOWN,
    need_answers: bool = True,
) -> Question:
    """Return the question of a row; `name` is its id where it has none.

    Its text is `question` or `extra_info.question`; its answers are `answers`, `golden_answers`,
    `reward_model.ground_truth.target` or `answer`, a text or a list of texts; its id is
    `id`, `qid` or `extra_info.index`, behind `data_source` where that is named, for ids of
    different data sets collide; or what `columns` names. Raises QuestionsError naming `where`.
    """
    fields = _plain(raw) | _named(raw, where, columns) if isinstance(raw, dict) else raw
    if not need_answers and isinstance(fields, dict):
        fields = {"answers": []} | fields
    try:
        row = msgspec.convert(fields, _Row)
    except msgspec.ValidationError as error:
        raise _misshapen(raw, fields, where, str(error)) from error
    if not row.question.strip():
        raise QuestionsError(f"{where}: question is empty, got {row.question!r}; write its text")
    wanting = need_answers and not row.answers
    if wanting or not all(answer.strip() for answer in row.answers):
        raise QuestionsError(
            f"{where}: answers is {row.answers!r}; give at least one, none of them empty"
        )
    if row.hops < 0:
        raise QuestionsError(f"{where}: hops is {row.hops!r}; give 0 (unknown) or more")
    id = name if row.id is None else str(row.id)
    extra = _extra(raw, where, columns) if columns.extra else ""
    return Question(id, row.question, tuple(row.answers), row.hops, extra)


def _extra(raw: Mapping[str, Any], where: str, columns: QuestionColumns) -> str:
    """Return the further columns that are named, as the text of a JSON object."""
    found = {name: _column(raw, name, where, "extra") for name in columns.extra}
    text = msgspec.json.encode(found, enc_hook=str).decode()
    if len(text) > MAX_EXTRA_CHARS:
        raise QuestionsError(
            f"{where}: questions.columns.extra take {len(text)} characters of JSON, at most "
            f"{MAX_EXTRA_CHARS} may be: name fewer, or columns with less in them"
        )
    return text


def _misshapen(raw: Any, fields: Any, where: str, wrong: str) -> QuestionsError:
    """The error of a row that has not the form of a question."""
    answers = fields.get("answers") if isinstance(fields, dict) else None
    for value in answers if isinstance(answers, list) else [answers]:
        if isinstance(value, bool | int | float):
            value = msgspec.json.encode(value).decode()
            return QuestionsError(f'{where}: answers holds {value}: write it as text: "{value}"')
    lacks = _LACKS.search(wrong)
    if lacks and isinstance(raw, dict):
        wrong = f"found no {lacks[1]} in its columns {', '.join(map(str, raw))}"
    shown = msgspec.json.encode(raw, enc_hook=str).decode()[:80]
    kind = NoQuestion if lacks or not isinstance(raw, dict) else QuestionsError
    return kind(f"{where}: {wrong}, got {shown!r}; {_WANTED}")


def _plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row under our own names; what it lacks is left out."""
    extra, rule = raw.get("extra_info"), raw.get("reward_model")
    extra = extra if isinstance(extra, dict) else {}
    truth = rule.get("ground_truth") if isinstance(rule, dict) else None
    target = truth.get("target") if isinstance(truth, dict) else truth
    theirs = _first(raw.get("answers"), raw.get("golden_answers"), target, raw.get("answer"))
    found = {
        "question": _first(raw.get("question"), extra.get("question")),
        "answers": [theirs] if isinstance(theirs, str) else theirs,
        "id": _id(raw, extra),
        "hops": raw.get("hops"),
    }
    return {field: value for field, value in found.items() if value is not None}


def _named(raw: Mapping[str, Any], where: str, columns: QuestionColumns) -> dict[str, Any]:
    """Return what the columns hold that are named."""
    found: dict[str, Any] = {}
    for field in ("question", "answers", "id"):
        if column := getattr(columns, field):
            value = _column(raw, column, where, field)
            found[field] = [value] if field == "answers" and isinstance(value, str) else value
    return found


def _column(raw: Mapping[str, Any], column: str, where: str, field: str) -> Any:
    """Return what one column holds. Raises QuestionsError where there is none of that name."""
    try:
        return _reach(raw, column)
    except KeyError:
        inner = (
            [f"{name}.{each}" for each in value] if isinstance(value, dict) else [name]
            for name, value in raw.items()
        )
        raise QuestionsError(
            f"{where}: there is no column {column!r} (questions.columns.{field}), only "
            f"{', '.join(name for names in inner for name in names)}: name one of them; "
            "questions.columns hold for train and eval alike: rename the columns of one file "
            "where they differ"
        ) from None


def _reach(raw: Any, column: str) -> Any:
    """Return the value of a column, `a.b` within a struct or each of a list. Raises KeyError."""
    if isinstance(raw, list):
        return [_reach(each, column) for each in raw]
    head, dot, rest = column.partition(".")
    if not isinstance(raw, dict) or (column not in raw and not dot):
        raise KeyError(column)
    return raw[column] if column in raw else _reach(raw[head], rest)


def _id(raw: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    own, source = _first(raw.get("id"), raw.get("qid"), extra.get("index")), raw.get("data_source")
    if not isinstance(own, str | int) or not isinstance(source, str) or not source:
        return own
    return own if str(own).startswith(f"{source}/") else f"{source}/{own}"


def _first(*values: Any) -> Any:
    """Return the first that is not null: a file of several layouts has all columns in each row."""
    return next((value for value in values if value is not None), None)

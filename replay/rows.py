"""The question of a file's row, in any of the known layouts or by the columns that are named."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from configs.schema import QuestionColumns
from replay.question_files import NoQuestion, QuestionsError
from replay.trajectory import Question

MAX_EXTRA_CHARS = 1 << 16  # it goes with each lease, and into the log with each group
MOST_SOURCE = 100  # characters
WANTED_ROW = (
    'write {"question": text, "answers": [text, …]}, optional "id" and "hops", or name the '
    "columns: questions.columns.question=…"
)
_LACKS = re.compile(r"missing required field `(\w+)`")
_KNOWN = QuestionColumns()  # none is named


class _Row(msgspec.Struct):
    question: str
    answers: list[str]
    id: str | int | None = None
    hops: int = 0


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
    `id`, `qid` or `extra_info.index`, behind its data set where that is named, for ids of different
    ones collide; its data set is `data_source`; or what `columns` names. Raises QuestionsError
    naming `where`.
    """
    source = _source(raw, where, columns) if isinstance(raw, dict) else ""
    fields = _plain(raw, source) | _named(raw, where, columns) if isinstance(raw, dict) else raw
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
    return Question(id, row.question, tuple(row.answers), row.hops, extra, source)


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
    return kind(f"{where}: {wrong}, got {shown!r}; {WANTED_ROW}")


def _plain(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the row under our own names; what it lacks is left out."""
    extra, rule = raw.get("extra_info"), raw.get("reward_model")
    extra = extra if isinstance(extra, dict) else {}
    truth = rule.get("ground_truth") if isinstance(rule, dict) else None
    target = truth.get("target") if isinstance(truth, dict) else truth
    theirs = _first(raw.get("answers"), raw.get("golden_answers"), target, raw.get("answer"))
    found = {
        "question": _first(raw.get("question"), extra.get("question")),
        "answers": [theirs] if isinstance(theirs, str) else theirs,
        "id": _id(raw, extra, source),
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


def _source(raw: Mapping[str, Any], where: str, columns: QuestionColumns) -> str:
    """Return the name of a row's data set; '' where it says none."""
    column = columns.source
    found = _column(raw, column, where, "source") if column else raw.get("data_source")
    if column and isinstance(found, int):
        found = str(found)
    if found is None or not (column or isinstance(found, str)):
        return ""
    if isinstance(found, str) and len(found) <= MOST_SOURCE and (found.isprintable() or not found):
        return found
    raise QuestionsError(
        f"{where}: the data set {str(found)[:MOST_SOURCE]!r} is no name of 1 to {MOST_SOURCE} "
        "printable characters: write one, or name another column: questions.columns.source=…"
    )


def _id(raw: Mapping[str, Any], extra: Mapping[str, Any], source: str) -> Any:
    own = _first(raw.get("id"), raw.get("qid"), extra.get("index"))
    if not isinstance(own, str | int) or not source:
        return own
    return own if str(own).startswith(f"{source}/") else f"{source}/{own}"


def _first(*values: Any) -> Any:
    """Return the first that is not null: a file of several layouts has all columns in each row."""
    return next((value for value in values if value is not None), None)

"""What an evaluation asks: files of questions → named sets, each in its file's order.

Consumes FILE or NAME=FILE, of any layout that replay/question_files.py reads; produces sets. Rows
that name their `data_source`, as those of scripts/prepare_data.py do, are of the set of that name;
others, and all of a file that is given a name, are one set. Waits for nothing but the disk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from replay.question_files import QuestionsError, load_questions, question_rows
from replay.trajectory import Question


@dataclass(frozen=True)
class QuestionSet:
    """Questions that are scored together; their ids are their own within the set."""

    name: str
    path: Path
    questions: tuple[Question, ...]


def load_sets(given: Sequence[str], limit: int = 0) -> tuple[QuestionSet, ...]:
    """Every set, or the first `limit` questions of each; 0 takes all.

    Raises ConfigError naming file, row and remedy, also where two files hold sets of one name.
    """
    sets: dict[str, QuestionSet] = {}
    for each in given:
        for found in _read(each):
            if found.name in sets:
                raise ConfigError(
                    f"--sets {each}: a set named {found.name!r} is in {sets[found.name].path} too: "
                    f"give this one another name: --sets OTHER={found.path}"
                )
            sets[found.name] = found
    return tuple(
        QuestionSet(each.name, each.path, each.questions[: limit or None]) for each in sets.values()
    )


def _read(given: str) -> Iterator[QuestionSet]:
    name, path = _named(given)
    if not path.is_file():
        raise ConfigError(
            f"--sets {given}: there is no file {str(path)!r}: name questions, JSONL or parquet, as "
            "FILE or NAME=FILE"
        )
    sets: dict[str, list[Question]] = {}
    try:
        rows = (raw for _, raw in question_rows(path))
        for question, raw in zip(load_questions(path), rows, strict=True):
            sets.setdefault(name or _source(raw) or path.stem, []).append(question)
    except QuestionsError as error:
        raise ConfigError(f"--sets {given}: {error}") from error
    for found, questions in sets.items():
        yield QuestionSet(found, path, tuple(questions))


def _named(given: str) -> tuple[str, Path]:
    name, separator, path = given.partition("=")
    if not separator or Path(given).exists():
        return "", Path(given)
    return name, Path(path)


def _source(raw: Any) -> str:
    source = raw.get("data_source")
    return source if isinstance(source, str) else ""

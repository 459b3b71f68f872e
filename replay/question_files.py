"""Rows of question files as they stand, one at a time: JSONL and parquet.

A `*` in a file's name stands for several, read as one.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from configs import hints

WANTED = 'name a JSONL or parquet file of {"question", "answers"}'
_BATCH = 1024


class QuestionsError(ValueError):
    """A question file cannot be used; the message names file, line, field, value and remedy."""


class NoQuestion(QuestionsError):
    """A row is none of a question file's."""


Refuse = Callable[[int, QuestionsError], None]


def question_rows(path: Path, refuse: Refuse | None = None) -> Iterator[tuple[int, Any]]:
    """Yield line or row number, from 1, and content of every row as it stands. A line that is no
    JSON is left to `refuse`, where that is given. Raises QuestionsError.

    Numbers go on from one file of several to the next.
    """
    require_there(path)
    before = last = 0
    for file in question_files(path):
        for number, raw in _parquet(file) if file.suffix == ".parquet" else _jsonl(file, refuse):
            last = before + number
            yield last, raw
        before = last


def question_files(path: Path) -> list[Path]:
    """Return the files that `path` names, in order: itself, but for a `*` in its name."""
    if "*" not in path.name or path.exists():
        return [path]
    return sorted(path.parent.glob(path.name)) or [path]


def require_there(path: Path) -> None:
    """Raise QuestionsError, with the name that is probably meant, where there is no such file."""
    if not all(file.is_file() for file in question_files(path)):
        wrong = "a folder" if path.is_dir() else "no file there"
        raise QuestionsError(f"{path}: {wrong}: {hints.did_you_mean(path) or WANTED}")


def _jsonl(path: Path, refuse: Refuse | None) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise QuestionsError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    except OSError as error:
        raise QuestionsError(f"{path}: cannot be read ({error.strerror})") from error
    if lines[0].lstrip().startswith("["):
        raise QuestionsError(
            f"{path}: one JSON list: write a row a line, jq -c '.[]' {path} > {_written(path)}"
        )
    if comma := _comma(path, next(filter(str.strip, lines), "")):
        raise QuestionsError(
            f"{path}: this is CSV: Forage reads JSONL and parquet: {_from_csv(path, comma)}"
        )
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                where = f"{path}:{number}"
                fault = NoQuestion(f"{where}: not JSON ({error}): {line[:80]!r}")
                if refuse is None:
                    raise fault from error
                refuse(number, fault)


def _comma(path: Path, head: str) -> str:
    """What parts the columns of a table whose first line this is; '' for other files."""
    counts = {comma: head.count(comma) for comma in ",;\t"}
    comma = max(counts, key=lambda each: counts[each])
    named = "question" in (name.strip(' "').lower() for name in head.split(comma))
    is_table = named or path.suffix.lower() in (".csv", ".tsv")
    return comma if is_table and counts[comma] and not head.lstrip().startswith("{") else ""


def _from_csv(path: Path, comma: str) -> str:
    """The command that writes a table's rows as JSON lines."""
    by = "" if comma == "," else f", delimiter={comma!r}"
    read = f"csv.DictReader(open(0, encoding='utf-8-sig', newline=''){by})"
    program = f"import csv, json; [print(json.dumps(row)) for row in {read}]"
    return f'python -c "{program}" < {quote(str(path))} > {_written(path)}'


def _written(path: Path) -> str:
    """The name for what is made of a file: never its own."""
    return quote(f"{path.stem}{'_rows' * (path.suffix == '.jsonl')}.jsonl")


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow  # heavy, and needed for such files alone
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                for raw in batch.to_pylist():
                    number += 1
                    yield number, raw
    except (OSError, pyarrow.ArrowException) as error:
        raise QuestionsError(f"{path}: cannot be read as parquet ({error})") from error

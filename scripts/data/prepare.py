"""The preparation of questions: several data sets in one schema.

Writes `OUT/train.parquet` and `OUT/eval.parquet` (SCHEMA; ids are `<set>/<split>/<its own>`, hops
0: unknown); `OUT/report.json` (rows, refusals, and questions that are asked in both, which
`--drop-overlap` takes out of the training set); `OUT/refused.jsonl` (unusable rows: file, row and
why). The default is Search-R1's recipe. A name may also be a file, JSONL or parquet of any layout
that runs read, or OWNER/NAME[:CONFIG][@SPLIT] on the Hub; NAME=… calls either something else, and
`questions.columns.*` are their columns.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.progress import BarColumn
from rich.table import Table

from actors.answers import normalize_answer
from configs.load import ConfigError, parse
from configs.schema import QuestionColumns
from replay.question_files import QuestionsError, question_rows
from replay.rows import question_of
from scripts.command.options import argument, option, refusing
from scripts.command.terminal import Bars, status
from scripts.data.data_sets import EVAL, HOPS, REPOSITORY, TRAIN, Source, find, hops_of
from scripts.setup.overrides import fields_of

SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("question", pyarrow.string()),
        ("answers", pyarrow.list_(pyarrow.string())),
        ("hops", pyarrow.int32()),
        ("data_source", pyarrow.string()),
        ("split", pyarrow.string()),
    ]
)
Row = dict[str, Any]
_NAMES = "sets, files or OWNER/NAME on the Hub, also NAME=FILE, with commas between"
_COLUMNS = "questions.columns."


@dataclass(frozen=True)
class PrepareOptions:
    out: Path = argument("the folder to write")
    overrides: tuple[str, ...] = argument(
        "columns of sets that are not Search-R1's", default=(), metavar="questions.columns.x=y"
    )
    train: str = option(_NAMES, default="nq,hotpotqa")
    eval: str = option(_NAMES, default=",".join(HOPS))
    from_: str = option("files in FlashRAG's layout; default: fetched from the Hub", default="")
    drop_overlap: bool = option("train on nothing that is evaluated", default=False)


def prepare(options: PrepareOptions) -> None:
    """Read, check, write, and print what was found. Raises ConfigError, OSError."""
    columns = columns_of(options.overrides)
    announce(options)
    with refusing(QuestionsError, OSError):
        report = prepared(options, columns)
    Console().print(_table(report))


def columns_of(overrides: Sequence[str]) -> QuestionColumns:
    """The columns that they name. Raises ConfigError for words that set anything else."""
    for field in fields_of(overrides):
        if not field.startswith(_COLUMNS):
            raise ConfigError(
                f"{field}: only {_COLUMNS}* are read here: --train and --eval name questions"
            )
    columns = parse("", overrides, "").questions.columns
    if columns.extra:
        raise ConfigError(
            f"{_COLUMNS}extra = {list(columns.extra)!r}: what is written here holds our own "
            "columns alone: name the files as they are in questions.train"
        )
    return columns


def announce(options: PrepareOptions) -> None:
    """Say which sets will be fetched, and how to do without."""
    named = dict.fromkeys(_names(options.train) + _names(options.eval))
    fetched = [name for name in named if name in HOPS and not options.from_]
    if fetched:
        print(
            f"forage: fetching from the Hub ({REPOSITORY}): {', '.join(fetched)}; to do without, "
            'name your own, --train FILE --eval FILE, or no set, --eval ""',
            file=sys.stderr,
        )


def prepared(options: PrepareOptions, columns: QuestionColumns) -> dict[str, Any]:
    """Read, check, write; return the report. Raises QuestionsError, OSError."""
    sources = {
        "train": find(_names(options.train), TRAIN, options.from_),
        "eval": find(_names(options.eval), EVAL, options.from_),
    }
    refused: list[Row] = []
    with Bars("{task.description}", BarColumn(), "{task.completed:,} rows") as bars:
        rows = {kind: _read(each, columns, refused, bars) for kind, each in sources.items()}
    with status("comparing and writing the questions"):
        return _written(options, rows, refused)


def _written(
    options: PrepareOptions, rows: dict[str, list[Row]], refused: Sequence[Row]
) -> dict[str, Any]:
    """Write the rows; return the report. Raises OSError."""
    both = _asked(rows["train"]) & _asked(rows["eval"])
    overlap = {
        kind: dict(_by_set(row for row in each if _key(row) in both)) for kind, each in rows.items()
    }
    if options.drop_overlap:
        rows["train"] = [row for row in rows["train"] if _key(row) not in both]
    options.out.mkdir(parents=True, exist_ok=True)
    for kind, each in rows.items():
        table = pyarrow.Table.from_pylist(each, SCHEMA)
        pyarrow.parquet.write_table(table, options.out / f"{kind}.parquet")
    report = {
        "rows": {kind: dict(_by_set(each)) for kind, each in rows.items()},
        "refused": dict(Counter(row["file"] for row in refused)),
        "asked_in_both": overlap,
        "dropped": options.drop_overlap,
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "refused.jsonl").write_text("".join(json.dumps(row) + "\n" for row in refused))
    return report


def _names(given: str) -> list[str]:
    return [name for name in given.split(",") if name]


def _read(
    sources: Sequence[Source], columns: QuestionColumns, refused: list[Row], bars: Bars
) -> list[Row]:
    rows: dict[str, Row] = {}
    for source in sources:
        before, its = len(rows), QuestionColumns() if source.known else columns

        def refuse(number: int, fault: QuestionsError, file: str = str(source.path)) -> None:
            refused.append({"file": file, "row": number, "why": str(fault)})

        numbered = question_rows(source.path, refuse)
        for number, raw in bars.track(numbered, description=f"{source.data_source} {source.split}"):
            try:
                row = _row(raw, source, number, its)
                if row["id"] in rows:
                    raise QuestionsError(f"id {row['id']!r} is that of another row too")
                rows[row["id"]] = row
            except QuestionsError as error:
                refuse(number, error)
        if len(rows) == before:
            why = refused[-1]["why"] if refused else "it is empty"
            raise QuestionsError(f"{source.path}: no row can be used: {why}")
    return list(rows.values())


def _row(raw: Any, source: Source, number: int, columns: QuestionColumns) -> Row:
    question = question_of(raw, f"{source.path}:{number}", str(number), columns)
    name = question.source or source.data_source
    own = question.id.removeprefix(f"{name}/")
    return {
        "id": f"{name}/{source.split}/{own.removeprefix(f'{source.split}/')}",
        "question": question.text,
        "answers": list(question.answers),
        "hops": hops_of(name, own, question.hops),
        "data_source": name,
        "split": source.split,
    }


def _key(row: Row) -> str:
    return normalize_answer(row["question"])


def _asked(rows: Iterable[Row]) -> set[str]:
    return {_key(row) for row in rows}


def _by_set(rows: Iterable[Row]) -> Counter[str]:
    return Counter(row["data_source"] for row in rows)


def _table(report: dict[str, Any]) -> Table:
    dropped = ", dropped" if report["dropped"] else ""
    table = Table("set", "used for", "questions", f"asked in both{dropped}", title="Prepared")
    for kind, counts in report["rows"].items():
        for name in {**counts, **report["asked_in_both"][kind]}:
            shared = report["asked_in_both"][kind].get(name, 0)
            table.add_row(name, kind, f"{counts.get(name, 0):,}", f"{shared:,}")
    refused = sum(report["refused"].values())
    if refused:
        table.caption = f"{refused:,} rows could not be used: see refused.jsonl"
    return table

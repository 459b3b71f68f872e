"""`python scripts/prepare_data.py OUT`: questions of several data sets → one schema.

Writes `OUT/train.parquet` and `OUT/eval.parquet` with the columns id (`<set>/<split>/<its own>`,
unique), question, answers (a list), hops (0: unknown), data_source and split; `OUT/report.json`
(rows, refusals, and questions that are asked in both, which `--drop-overlap` takes out of the
training set); `OUT/refused.jsonl` (rows that cannot be used: file, row and why). By default
Search-R1's recipe: trained on NQ and HotpotQA, evaluated on all seven sets, each one's test split,
else dev, else train. A name may also be a file, FILE or NAME=FILE: JSONL or parquet of any layout
that runs read.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.progress import track
from rich.table import Table

from actors.reward import normalize_answer
from replay.question_files import QuestionsError, question_of, question_rows
from scripts.data_sets import EVAL, HOPS, TRAIN, Source, find, hops_of

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


def main(given: Sequence[str] | None = None) -> int:
    """Prepare, and say what was found; 2 when something that was given is at fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("out", type=Path)
    names = "sets, FILE or NAME=FILE, with commas between"
    add("--train", default="nq,hotpotqa", help=names)
    add("--eval", default=",".join(HOPS), help=names)
    add(
        "--from", dest="folder", default="", help="FlashRAG's layout; default: fetched from the Hub"
    )
    add("--drop-overlap", action="store_true", help="train on nothing that is evaluated")
    arguments = parser.parse_args(given)
    try:
        report = prepare(arguments)
    except (QuestionsError, OSError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    Console().print(_table(report))
    return 0


def prepare(given: argparse.Namespace) -> dict[str, Any]:
    """Read, check, write; the report. Raises QuestionsError, OSError."""
    sources = {
        "train": find(_names(given.train), TRAIN, given.folder),
        "eval": find(_names(given.eval), EVAL, given.folder),
    }
    refused: list[Row] = []
    rows = {kind: _read(each, refused) for kind, each in sources.items()}
    both = _asked(rows["train"]) & _asked(rows["eval"])
    overlap = {kind: _shares(each, both) for kind, each in rows.items()}
    if given.drop_overlap:
        rows["train"] = [row for row in rows["train"] if _key(row) not in both]
    given.out.mkdir(parents=True, exist_ok=True)
    for kind, each in rows.items():
        table = pyarrow.Table.from_pylist(each, SCHEMA)
        pyarrow.parquet.write_table(table, given.out / f"{kind}.parquet")
    report = {
        "rows": {kind: dict(_by_set(each)) for kind, each in rows.items()},
        "refused": dict(Counter(row["file"] for row in refused)),
        "asked_in_both": overlap,
        "dropped": given.drop_overlap,
    }
    (given.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.out / "refused.jsonl").write_text("".join(json.dumps(row) + "\n" for row in refused))
    return report


def _names(given: str) -> list[str]:
    return [name for name in given.split(",") if name]


def _read(sources: Sequence[Source], refused: list[Row]) -> list[Row]:
    rows: dict[str, Row] = {}
    for source in sources:
        before = len(rows)

        def refuse(number: int, fault: QuestionsError, file: str = str(source.path)) -> None:
            refused.append({"file": file, "row": number, "why": str(fault)})

        numbered = question_rows(source.path, refuse)
        for number, raw in track(numbered, f"{source.data_source} {source.split}"):
            try:
                row = _row(raw, source, number)
                if row["id"] in rows:
                    raise QuestionsError(f"id {row['id']!r} is that of another row too")
                rows[row["id"]] = row
            except QuestionsError as error:
                refuse(number, error)
        if len(rows) == before:
            why = refused[-1]["why"] if refused else "it is empty"
            raise QuestionsError(f"{source.path}: no row can be used: {why}")
    return list(rows.values())


def _row(raw: Any, source: Source, number: int) -> Row:
    question = question_of(raw, f"{source.path}:{number}", str(number))
    told = raw.get("data_source") if isinstance(raw, dict) else None
    name = told if isinstance(told, str) and told else source.data_source
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


def _shares(rows: Iterable[Row], both: set[str]) -> dict[str, int]:
    return dict(_by_set(row for row in rows if _key(row) in both))


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


if __name__ == "__main__":
    sys.exit(main())

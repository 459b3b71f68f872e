"""The audit of a corpus: how many questions it can answer at all.

Of the questions in `questions.train` and `questions.eval`: how many have an answer anywhere in
`retrieval.corpus`, and in the first k passages that its index finds for the question itself; with
`--searches RUN`, also in what that run's recorded searches brought. `reach` says when an answer
counts.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.load import ConfigError, load
from replay.protocol import ReplayError
from replay.questions import left_out
from replay.trajectory import Kind
from retrieval_server.index.open_index import open_index
from retrieval_server.protocol import RetrievalError
from scripts.command.options import Options, argument, option, overrides, refusing
from scripts.command.terminal import Bars, clean
from scripts.data.reach import (
    Asked,
    Figures,
    Reach,
    RecordedSearches,
    eval_in_train,
    questions_of,
)
from scripts.setup.hub import with_hub_paths


@dataclass(frozen=True)
class AuditOptions(Options):
    """Options of `forage data audit`. Raises ConfigError for a file that cannot be written."""

    config: str = argument("a YAML file, for example configs/base.yaml")
    overrides: tuple[str, ...] = overrides()
    searches: Path | None = option("whose searches to look at", metavar="RUN")
    json: Path | None = option("write the figures there", metavar="FILE")
    list: bool = option("list questions without an answer", default=False)


def audit(options: AuditOptions) -> None:
    """Check, measure, report. Raises ConfigError."""
    with refusing(ReplayError, RetrievalError):
        report, questions, searches = measured(options)
    console = Console()
    show(report, console)
    if searches and options.searches:
        warn(searches, options.searches, report["corpus"])
    if options.list:
        list_missing(questions, report["files"], console)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the figures, a column for each file; shares are of the row that they are about."""
    files: dict[Kind, Figures] = report["files"]
    title = f"answers in {report['passages']} passages of {report['corpus']}\n{report['index']}"
    table = Table("", *files, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for words, cells in _rows(files):
        table.add_row(words, *cells)
    console.print(table)
    if both := report["eval_in_train"]:
        console.print(
            f"{both} of {files['eval']['questions']} eval questions are also in train: their EM "
            "shows memory, not skill",
            highlight=False,
            soft_wrap=True,
        )


def _rows(files: Mapping[Kind, Figures]) -> Iterable[tuple[str, list[str]]]:
    each = list(files.values())
    totals = [figures["questions"] for figures in each]
    yield "questions", [str(total) for total in totals]
    for words, name in (("with an answer to look for", "with_answers"), ("anywhere", "anywhere")):
        yield words, [_share(f[name], total) for f, total in zip(each, totals, strict=True)]
    for k in each[0]["top"]:
        found = [figures["top"][k] for figures in each]
        yield f"in the top {k} for the question", list(map(_share, found, totals))
    if "recorded" in each[0]:
        for name in each[0]["recorded"]:
            counts = [figures["recorded"][name] for figures in each]
            yield f"{name} in the run", [str(count["made"]) for count in counts]
            cells = [_share(count["answered"], count["made"]) for count in counts]
            yield f"{name} that brought an answer", cells


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.1%})" if whole else "-"


def list_missing(
    questions: Sequence[Asked], files: Mapping[Kind, Figures], console: Console
) -> None:
    """Print each question without an answer in the corpus, on a line."""
    missing = {(kind, id) for kind, figures in files.items() for id in figures["missing"]}
    for kind, question in questions:
        if (kind, question.id) in missing:
            line = f"{kind} {question.id}: {question.text} [{' | '.join(question.answers)}]"
            console.print(clean(line), markup=False, highlight=False, soft_wrap=True)


def warn(searches: RecordedSearches, run: Path, corpus: str) -> None:
    """Print what the figures of a run's searches leave out."""
    left_out = (
        (searches.strangers, "rollouts of questions that the configuration does not name"),
        (searches.compacted, "rollouts whose searches were compacted away (forage compact)"),
        (searches.of_failed, "searches of rollouts that failed, and were made again"),
        (len(searches.missing), f"passages that {corpus} does not hold"),
    )
    for count, what in left_out:
        if count:
            print(clean(f"forage: {run}: without {count} {what}"), file=sys.stderr)


def measured(
    options: AuditOptions,
) -> tuple[dict[str, Any], list[Asked], RecordedSearches | None]:
    """The figures, the questions they are of, and the recorded searches. Raises ConfigError."""
    read = ("questions.train", "questions.eval", "retrieval.encoder")
    config = with_hub_paths(load(options.config, options.overrides), read)
    corpus = config.retrieval.corpus or config.retrieval.index
    if not corpus:
        raise ConfigError("retrieval.corpus is empty: name the passages to look in")
    if config.retrieval.is_live:
        raise ConfigError(
            f"retrieval.kind = {config.retrieval.kind!r} searches the web, and a corpus is looked "
            "in: say retrieval.kind="
        )
    questions = questions_of(config)
    for line in left_out(config):
        print(clean(f"forage: {line}"), file=sys.stderr)
    with Bars() as progress:
        searches = RecordedSearches(options.searches, questions) if options.searches else None
        opening = progress.add_task("opening the index", total=None)
        passages, index = open_index(config.retrieval)
        progress.update(opening, total=1, completed=1)
        reach = Reach(questions, passages, index, config.retrieval.top_k)
        files = reach.measure(progress, searches)
    report = {
        "corpus": corpus,
        "passages": len(passages),
        "index": index.name,
        "files": files,
        "eval_in_train": eval_in_train(questions),
    }
    return report, questions, searches

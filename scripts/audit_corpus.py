"""Whether questions can be answered at all: `scripts/audit_corpus.py CONFIG [a.b=c …]`.

Of the questions in `questions.train` and `questions.eval`: how many have an answer anywhere in
`retrieval.corpus`, and in the first k passages that its index (`retrieval.index`, or BM25) finds
when the question itself is the query; with `--searches RUN`, also in what that run's recorded
searches brought. An answer counts where its words follow one another, each of them whole, in a
passage's title and text, after the reward's normalisation. Exit code 0: done, 2: bad input.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from configs.load import ConfigError, load
from replay.protocol import ReplayError
from replay.question_files import left_out
from replay.trajectory import Kind
from retrieval_server.opening import open_index
from retrieval_server.protocol import RetrievalError
from scripts.audit_reach import Figures, Reach, questions_of
from scripts.audit_searches import Asked, RecordedSearches

BAD_INPUT = 2


def show(report: Mapping[str, Any], console: Console) -> None:
    """The figures as a table, a column for each file; shares are of the row that they are about."""
    files: dict[Kind, Figures] = report["files"]
    title = f"answers in {report['passages']} passages of {report['corpus']}\n{report['index']}"
    table = Table("", *files, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for words, cells in _rows(files):
        table.add_row(words, *cells)
    console.print(table)


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
    """Each question without an answer in the corpus, on a line."""
    missing = {(kind, id) for kind, figures in files.items() for id in figures["missing"]}
    for kind, question in questions:
        if (kind, question.id) in missing:
            line = f"{kind} {question.id}: {question.text} [{' | '.join(question.answers)}]"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def warn(searches: RecordedSearches, run: Path, corpus: str) -> None:
    """Say what the figures of a run's searches leave out."""
    left_out = (
        (searches.strangers, "rollouts of questions that the configuration does not name"),
        (searches.compacted, "rollouts whose searches were compacted away (forage compact)"),
        (searches.of_failed, "searches of rollouts that failed, and were made again"),
        (len(searches.missing), f"passages that {corpus} does not hold"),
    )
    for count, what in left_out:
        if count:
            print(f"audit_corpus: {run}: without {count} {what}", file=sys.stderr)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a YAML file, for example configs/base.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields to override")
    parser.add_argument("--searches", type=Path, metavar="RUN", help="whose searches to look at")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--list", action="store_true", help="list questions without an answer")
    return parser.parse_intermixed_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Check, measure, report; the exit code."""
    given = parse(words)
    try:
        report, questions, searches = measured(given)
    except (ConfigError, ReplayError, RetrievalError) as error:
        print(f"audit_corpus: {error}", file=sys.stderr)
        return BAD_INPUT
    console = Console()
    show(report, console)
    if searches:
        warn(searches, given.searches, report["corpus"])
    if given.list:
        list_missing(questions, report["files"], console)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measured(
    given: argparse.Namespace,
) -> tuple[dict[str, Any], list[Asked], RecordedSearches | None]:
    """The figures, the questions they are of, and the recorded searches. Raises ConfigError,
    LogError, CodecError, CorpusError, BadIndex.
    """
    config = load(given.config, given.overrides)
    corpus = config.retrieval.corpus or config.retrieval.index
    if not corpus:
        raise ConfigError("retrieval.corpus is empty: name the passages to look in")
    if given.json and not given.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {str(given.json)!r}: there is no such folder to write it in")
    questions = questions_of(config)
    for line in left_out(config.questions):
        print(f"audit_corpus: {line}", file=sys.stderr)
    with Progress(console=Console(stderr=True)) as progress:
        searches = RecordedSearches(given.searches, questions) if given.searches else None
        opening = progress.add_task("opening the index", total=None)
        passages, index = open_index(config.retrieval)
        progress.update(opening, total=1, completed=1)
        reach = Reach(questions, passages, index, config.retrieval.top_k)
        files = reach.measure(progress, searches)
    report = {"corpus": corpus, "passages": len(passages), "index": index.name, "files": files}
    return report, questions, searches


if __name__ == "__main__":
    sys.exit(main())

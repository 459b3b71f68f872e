"""Searches a second, and how long one takes: `forage bench retrieval [--quick]`.

The real server and the real client over Debian's package descriptions, or `--corpus`, by BM25 and
by vectors; beside them, in turn and in the same run, a server and clients of Search-R1's shape over
the same index and encoder (`baseline`). Then more askers than can be served (`overload`), rankers
and kinds of vectors at a size near wiki-18's (`scale`) and answers on the wiki task's corpus
(`answers`). METHOD says how. What both find is compared. A run that was cut off goes on with the
same command; a finished one begins anew. A part that was measured alone (`--only`) is kept until
the whole is finished.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from configs.runtime.process import REPOSITORY, limit_threads
from retrieval_server.corpus import load_corpus
from retrieval_server.protocol import RetrievalError
from scripts.bench import harness
from scripts.bench.retrieval import answers, scale
from scripts.bench.retrieval.corpus import debian
from scripts.bench.retrieval.overload import DEADLINE_S, REQUEST_DEADLINE_S, overload_table
from scripts.bench.retrieval.overload import GOALS as OVERLOAD_GOALS
from scripts.bench.retrieval.parts import CACHE, PARTS, Part, Parts
from scripts.bench.retrieval.run import GOALS, over_naive
from scripts.command.options import option, refusing

PASSAGES, QUICK_DENSE = 50_000, 2_500
ALL_GOALS = GOALS | OVERLOAD_GOALS | scale.GOALS | answers.GOALS
CODE = ("retrieval_server", "scripts.bench.retrieval")  # of which rows on file are figures
METHOD = {
    "passages": "Debian's packages: name, description, section, tags, relations, maintainer",
    "queries": "2 to 8 consecutive words of a passage's title and first sentence",
    "groups": "8 siblings: half of them the same string; case, punctuation, two words swapped, one "
    "word more. Siblings ask at once and go on together; open loop: within 50 ms",
    "ours": "RetrievalClient → retrieval_server.worker, nothing remembered unless it says so",
    "aiohttp, requests": "one POST a query to FastAPI's thread pool, as Search-R1's users do",
    "calls/query": "POSTs without retries; calls_per_query: the worst closed row in groups",
    "bare": "our server, a POST a query over our client's connections",
    "over_naive": "medians, over the better of aiohttp and requests",
    "added_p50_ms": "ours over bare, one asker with 20 ms between questions; idle_over_naive_ms: "
    "over aiohttp and the baseline's server",
    "dense": "HNSW32 by an encoder of MiniLM-L6's shape (random weights) that reads 32 tokens of a "
    "passage; two threads for either server",
    "recall10": "of LSA vectors (384 numbers) of the same texts, for 1,000 other queries, against "
    "Flat, at the default settings",
    "overload": "closed-loop askers through four RetrievalClients with 3 s a search, nothing "
    "remembered, at our server over BM25 drawn out to so many queries a second; 1x: as many askers "
    f"as it answers in its deadline, {REQUEST_DEADLINE_S} s; saturation: half as many",
    "overload_goodput_min": "queries answered in time a second, 3 s after the askers began, over "
    "the saturation",
    "overload_p99_over_deadline": "the largest p99 of answered searches, from the question on, "
    f"over the {DEADLINE_S:g} s that a search has; the client ends it then itself",
    **scale.METHOD,
    **answers.METHOD,
    "p50, p99": "of what was answered since the window began; open loop: since it was due",
}


@dataclass(frozen=True)
class BenchRetrievalOptions(harness.BenchOptions):
    """Options of `forage bench retrieval`; `quick`: also a smaller dense index."""

    corpus: Path | None = option("JSONL of passages, in place of Debian's packages")
    passages: int = option("of Debian's packages", default=PASSAGES, least=1)
    out: Path = option("finished rows", default=REPOSITORY / "runs" / "bench_retrieval")
    fresh: bool = option("measure and build all anew", default=False)
    scale: int | None = option("generated passages (2,000,000; quick: 50,000)", least=5000)
    only: Part | None = option("a part alone, whose figures are kept for the whole")

    def corpora(self) -> dict[str, Path]:
        """The corpus of each kind of index. Raises NoCorpus, ConfigError."""
        if self.corpus:
            with refusing(RetrievalError):
                load_corpus(self.corpus)
            return {"bm25": self.corpus, "dense": self.corpus}
        dense = min(self.passages, QUICK_DENSE) if self.quick else self.passages
        return {"bm25": debian(CACHE, self.passages), "dense": debian(CACHE, dense)}


def measure(options: BenchRetrievalOptions, report: harness.Report) -> dict[str, Any]:
    """All figures, or those of the part that is asked for. Raises NoCorpus, RetrievalError,
    RunFailed.
    """
    corpora = options.corpora()
    code = harness.digest_of([*harness.sources(*CODE), *corpora.values()])
    kept = {part: harness.Rows(options.out / part, f"{options.quick} {code}") for part in PARTS}
    wanted = [part for part in PARTS if options.only in (None, part)]
    if options.fresh:
        for part in wanted:
            kept[part].forget()
    found: dict[str, Any] = {}
    with harness.scratch() as folder, harness.Processes(folder) as processes:
        parts = Parts(processes, folder, corpora, report, quick=options.quick, fresh=options.fresh)
        for part in wanted:
            found |= parts.measure(part, kept[part], options.scale)
    if not options.only:  # a part that was measured alone is there for the whole
        for rows in kept.values():
            rows.forget()
    return found | {"method": METHOD}


def tables(found: dict[str, Any]) -> list[Table]:
    """Every row, the cost and recall of indexes, and the goals, of the parts that were measured."""
    told = []
    if "rows" in found:
        told += [_loads(found["rows"]), _indexes(found)]
    if "overload" in found:
        told.append(overload_table(found["overload"]))
    if "scale" in found:
        told += scale.tables(found)
    if found.get("answers"):
        told.append(answers.table(found["answers"]))
    goals = {name: goal for name, goal in ALL_GOALS.items() if name in found}
    if found.get("scale_passages", 0) < scale.PASSAGES:
        goals = {name: goal for name, goal in goals.items() if name not in scale.GOALS}
    return [*told, harness.goals_table(found, goals)]


def _loads(rows: list[dict[str, Any]]) -> Table:
    title = "Searches (ms: p50, p99; CPU: server, askers; refused: 503s, asked again)"
    loads = Table("load", "by", "a second", "over", "ms", "errors", "refused", "calls/query", "CPU",
                  title=title)  # fmt: skip
    for row in rows:
        over = None if row["row"]["load"].get("rate") else over_naive(row)
        for side, told in row["sides"].items():
            loads.add_row(
                row["row"]["name"] if side == "ours" else "",
                side,
                f"{told['qps']:,.0f}",
                f"{over:.2f}" if over and side == "ours" else "",
                f"{_ms(told['p50_s'])}, {_ms(told['p99_s'])}",
                f"{told['errors']:,}",
                f"{told['refused_503']:,}",
                f"{told['calls_per_query']:.2f}",
                f"{told['server_cpu']:.2f} {told['load_cpu']:.2f}",
            )
    return loads


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:,.1f}"


def _indexes(found: dict[str, Any]) -> Table:
    table = Table("index", "seconds to make", "MB on disk", "MB of memory", "recall@10")
    for kind, told in found["builds"].items():
        size = f"{told['file_bytes'] / 1e6:,.1f}"
        peak = f"{told['peak_rss_bytes'] / 1e6:,.0f} (builder's peak)"
        table.add_row(f"{kind}, encoded too" if kind == "dense" else kind,
                      f"{told['seconds']:.1f}", size, peak, "")  # fmt: skip
    for told in found["recall"].values():
        if isinstance(told, dict):
            size, rss = told["file_bytes"] / 1e6, told["rss_bytes"] / 1e6
            table.add_row(told["index"], f"{told['build_s']:.1f}", f"{size:,.1f}",
                          f"{rss:,.0f}", f"{told['recall10']:.3f}")  # fmt: skip
    return table


def bench(options: BenchRetrievalOptions) -> None:
    """Measure, print the tables, write the JSON. Raises NoCorpus, RetrievalError, RunFailed."""
    limit_threads(2)  # of what is started without limits of its own
    try:
        found = measure(options, harness.reporter())
    except KeyboardInterrupt:
        print("forage: the same command goes on", file=sys.stderr)
        raise
    harness.finish(options, found, tables(found), width=120)

"""Searches a second, and how long one takes: `forage bench retrieval [--quick]`.

The real server and the real client over Debian's package descriptions, or `--corpus`, by BM25 and
by vectors; beside them, in turn and in the same run, a server and clients of Search-R1's shape over
the same index and encoder (`baseline`). Then rankers and kinds of vectors at a size near wiki-18's
(`scale`). METHOD says how. What both find is compared. A run that was
cut off goes on with the same command; a finished one begins anew.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from configs.runtime.process import REPOSITORY, limit_threads
from retrieval_server.corpus import load_corpus
from retrieval_server.protocol import RetrievalError
from scripts.bench import harness
from scripts.bench.retrieval import scale
from scripts.bench.retrieval.corpus import debian, draw_queries, siblings
from scripts.bench.retrieval.overload import GOALS as OVERLOAD_GOALS
from scripts.bench.retrieval.overload import (
    REQUEST_DEADLINE_S,
    Overload,
    overload_rows,
    overload_summary,
    overload_table,
)
from scripts.bench.retrieval.recall import build, recalls
from scripts.bench.retrieval.run import FEW, GOALS, Bench, over_naive, rows, summary
from scripts.options import option, refusing

CACHE = REPOSITORY / ".cache" / "retrieval"
PASSAGES, QUICK_DENSE = 50_000, 5_000
UNITS = 16_384  # distinct queries; as many groups
SEED = 0
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
    **scale.METHOD,
    "p50, p99": "of what was answered since the window began; open loop: since it was due",
}


@dataclass(frozen=True)
class BenchRetrievalOptions(harness.BenchOptions):
    """Options of `forage bench retrieval`; `quick`: also a smaller dense index."""

    corpus: Path | None = option("JSONL of passages, in place of Debian's packages")
    passages: int = option("of Debian's packages", default=PASSAGES, least=1)
    out: Path = option("finished rows", default=REPOSITORY / "runs" / "bench_retrieval")
    fresh: bool = option("measure and build all anew", default=False)
    scale: int | None = option("generated passages (2,000,000; quick: 100,000)", least=5000)
    only: Literal["scale"] | None = option("the part with generated passages alone")

    def corpora(self) -> dict[str, Path]:
        """The corpus of each kind of index. Raises NoCorpus, ConfigError."""
        if self.corpus:
            with refusing(RetrievalError):
                load_corpus(self.corpus)
            return {"bm25": self.corpus, "dense": self.corpus}
        dense = min(self.passages, QUICK_DENSE) if self.quick else self.passages
        return {"bm25": debian(CACHE, self.passages), "dense": debian(CACHE, dense)}


def measure(options: BenchRetrievalOptions, report: harness.Report) -> dict[str, Any]:
    """All figures. Raises NoCorpus, RetrievalError, RunFailed."""
    corpora = options.corpora()
    code = harness.digest_of([*harness.sources(*CODE), *corpora.values()])
    kept = harness.Rows(options.out, f"{options.quick} {code}")
    if options.fresh:
        kept.forget()
    with harness.scratch() as folder, harness.Processes(folder) as processes:
        found: dict[str, Any] = {}
        if not options.only:
            found = _served(options, corpora, folder, processes, kept, report)
        size = options.scale or (scale.QUICK_PASSAGES if options.quick else scale.PASSAGES)
        queries = scale.QUICK_QUERIES if options.quick else scale.QUERIES
        large = scale.Scale(processes, kept, folder, CACHE, report)
        found |= large.measure(size, corpora["dense"], queries, options.fresh)
    kept.forget()
    return found | {"method": METHOD}


def _served(
    options: BenchRetrievalOptions,
    corpora: dict[str, Path],
    folder: Path,
    processes: harness.Processes,
    kept: harness.Rows,
    report: harness.Report,
) -> dict[str, Any]:
    """The figures of servers and askers, and what their indexes find."""
    settings: dict[str, dict[str, Any]] = {}
    builds = {}
    for kind, corpus in corpora.items():
        report(f"building an index: {kind}")
        made, builds[kind] = build(processes, corpus, CACHE, kind, options.fresh)
        settings[kind] = {"corpus": str(corpus.resolve()), "index": str(made), "threads": 2}
    settings["bm25-few"] = settings["bm25"] | {"max_waiting_queries": FEW}
    side_by_side = Bench(folder, processes, settings)
    documents = load_corpus(corpora["bm25"])
    queries = draw_queries(documents, min(UNITS, 4 * len(documents)), SEED)
    side_by_side.units("single", [[query] for query in queries])
    side_by_side.units("groups", [siblings(query, SEED) for query in queries])
    found = []
    for row in (row for index in corpora for row in rows(index, options.quick)):
        report(row.name)
        found.append(kept.get(row.name, partial(side_by_side.measure, row)))
    overload = Overload(folder, processes, settings["bm25"], queries)
    overloaded = _overloaded(overload, options.quick, kept, report)
    report("recall")
    recall = kept.get("recall", partial(recalls, processes, corpora["dense"], folder, 1000))
    return {
        **summary(found, recall),
        **overload_summary(overloaded),
        "rows": found,
        "overload": overloaded,
        "builds": builds,
        "recall": recall,
    }


def _overloaded(
    overload: Overload, quick: bool, kept: harness.Rows, report: harness.Report
) -> list[dict[str, Any]]:
    found = []
    for row in overload_rows(quick):
        report(f"overload: {row.name}")
        found.append(kept.get(["overload", row.name], partial(overload.measure, row)))
    return found


def tables(found: dict[str, Any]) -> list[Table]:
    """Every row, the cost and recall of indexes, and the goals."""
    if "rows" not in found:
        return scale.tables(found)
    title = "Searches (ms: p50, p99; CPU: server, askers; refused: 503s, asked again)"
    loads = Table("load", "by", "a second", "over", "ms", "errors", "refused", "calls/query", "CPU",
                  title=title)  # fmt: skip
    for row in found["rows"]:
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
    goals = harness.goals_table(found, GOALS | OVERLOAD_GOALS)
    served = [loads, overload_table(found["overload"]), _indexes(found), goals]
    return [*served, *scale.tables(found)]


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

"""How many searches a second, and how long one takes: `scripts/bench_retrieval.py [--quick]`.

The real server and the real client over 50,000 passages of real text (`apt-cache dumpavail`, or
`--corpus`), by BM25 and by vectors (HNSW, an encoder of MiniLM-L6's shape with random weights);
beside them, in turn and in the same run, a server and clients of Search-R1's shape over the same
index and encoder (`scripts.bench_retrieval_naive`, `…_askers`). Closed loop with 1 to 1,000 askers,
open loop at fixed rates, distinct queries and groups of 8 nearly the same. What both find is
compared. A run that was cut off goes on with the same command; a finished one begins anew.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.process import limit_threads
from retrieval_server.corpus import load_corpus
from retrieval_server.protocol import RetrievalError
from scripts.bench_retrieval_build import build, recalls
from scripts.bench_retrieval_corpus import NoCorpus, debian, draw_queries, siblings
from scripts.bench_retrieval_plan import FEW, GOALS, over_naive, rows, summary
from scripts.bench_retrieval_run import Bench, Rows, digest_of
from scripts.bench_stream_run import Processes, RunFailed

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / ".cache" / "retrieval"
PASSAGES, QUICK_DENSE = 50_000, 5_000
UNITS = 16_384  # distinct queries; as many groups
SEED = 0
Report = Callable[[str], None]
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
    "p50, p99": "of what was answered since the window began; open loop: since it was due",
}


def measure(given: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Everything. Raises NoCorpus, RetrievalError, RunFailed."""
    if given.corpus:
        load_corpus(given.corpus)  # what is wrong with it is said first
    corpora = {
        "bm25": given.corpus or debian(CACHE, given.passages),
        "dense": given.corpus
        or debian(CACHE, min(given.passages, QUICK_DENSE) if given.quick else given.passages),
    }
    sources = [*(REPOSITORY / "retrieval_server").glob("*.py"),
               *(REPOSITORY / "scripts").glob("bench_retrieval*.py")]  # fmt: skip
    kept = Rows(given.out, f"{given.quick} {digest_of([*sources, *corpora.values()])}")
    if given.fresh:
        kept.forget()
    with TemporaryDirectory(prefix="forage-bench-") as name, Processes(Path(name)) as processes:
        folder = Path(name)
        settings: dict[str, dict[str, Any]] = {"bm25": {"corpus": str(corpora["bm25"].resolve())}}
        builds = {}
        for kind, corpus in corpora.items():
            report(f"building an index: {kind}")
            made, told = build(processes, corpus, CACHE, kind, given.fresh)
            builds[kind] = told
            settings[kind] = {"corpus": str(corpus.resolve()), "index": str(made), "threads": 2}
        settings["bm25-few"] = {**settings["bm25"], "max_waiting_queries": FEW}
        bench = Bench(folder, processes, settings)
        documents = load_corpus(corpora["bm25"])
        queries = draw_queries(documents, min(UNITS, 4 * len(documents)), SEED)
        bench.units("single", [[query] for query in queries])
        bench.units("groups", [siblings(query, SEED) for query in queries])
        found = []
        for row in (row for index in corpora for row in rows(index, given.quick)):
            report(row.name)
            found.append(kept.get(row.name, partial(bench.measure, row)))
        report("recall")
        recall = kept.get("recall", partial(recalls, processes, corpora["dense"], folder, 1000))
    kept.forget()
    figures = summary(found, recall)
    return {**figures, "rows": found, "builds": builds, "recall": recall, "method": METHOD}


def tables(found: dict[str, Any]) -> list[Table]:
    """Every row, what indexes cost and find, and the goals."""
    title = "Searches (ms: p50, p99; CPU: server, askers; refused: 503s, asked again)"
    loads = Table("load", "by", "a second", "over", "ms", "errors", "refused", "calls/query", "CPU",
                  title=title)  # fmt: skip
    for row in found["rows"]:
        over = over_naive(row)
        for side, told in row["sides"].items():
            loads.add_row(
                row["row"]["name"] if side == "ours" else "",
                side,
                f"{told['qps']:,.0f}",
                f"{over:.2f}"
                if over and side == "ours" and not row["row"]["load"].get("rate")
                else "",
                f"{_ms(told['p50_s'])}, {_ms(told['p99_s'])}",
                f"{told['errors']:,}",
                f"{told['refused_503']:,}",
                f"{told['calls_per_query']:.2f}",
                f"{told['server_cpu']:.2f} {told['load_cpu']:.2f}",
            )
    return [loads, _indexes(found), _goals(found)]


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


def _goals(found: dict[str, Any]) -> Table:
    table = Table("measured", "value", "goal", "")
    for name, (limit, more) in GOALS.items():
        if (value := found[name]) is not None:
            met = value >= limit if more else value <= limit
            goal = f"{'≥' if more else '≤'} {limit:g}"
            table.add_row(name, f"{value:.3g}", goal, "met" if met else "[bold red]missed[/]")
    return table


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, write the JSON; exit code 1 where something could not be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer and shorter rows, a smaller dense index")
    add("--json", type=Path, help="where to write the figures")
    add("--corpus", type=Path, help="JSONL of passages, in place of Debian's packages")
    add("--passages", type=int, default=PASSAGES, help="of Debian's packages")
    add("--out", type=Path, default=REPOSITORY / "runs" / "bench_retrieval", help="finished rows")
    add("--fresh", action="store_true", help="measure and build all anew")
    given = parser.parse_args(words)
    limit_threads(2)  # of what is started without limits of its own
    notes, start_s = Console(stderr=True), time.monotonic()
    try:
        found = measure(given, lambda s: notes.print(f"{time.monotonic() - start_s:5.0f} s  {s}"))
    except (NoCorpus, RetrievalError, RunFailed) as error:
        print(f"bench_retrieval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench_retrieval: interrupted; the same command goes on", file=sys.stderr)
        return 130
    Console(width=None if sys.stdout.isatty() else 120).print(*tables(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Both rankers of words, and each kind of vectors, at a size near wiki-18's.

`forage bench retrieval --only scale`. Passages are generated (`generated`), vectors drawn
(`mixture`); each figure is a row that an interrupted run keeps. What 21 million would take is
extrapolated in proportion to the passages, which overstates tantivy.
`python -m scripts.bench.retrieval.scale SETTINGS OUT` measures the searches of one ranker.
"""

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from configs.retrieval import RetrievalConfig
from configs.runtime.process import begin
from retrieval_server.index.base import Index
from scripts.bench.harness import (
    Processes,
    Report,
    Rows,
    RunFailed,
    at_least,
    digest_of,
    sources,
    status_bytes,
)
from scripts.bench.retrieval import generated
from scripts.bench.retrieval.mixture import COMPONENTS, Plan
from scripts.bench.retrieval.recall import build, recall

PASSAGES, QUICK_PASSAGES = 2_000_000, 50_000
WIKI_18 = 21_015_324
RANKERS = ("bm25", "tantivy")
TOP_K = 3
SEARCH_S = 1800.0
QUERIES, QUICK_QUERIES = 400, 100
GOALS = {"tantivy_over_bm25_questions": at_least(10.0)}
METHOD = {
    "scale": "generated passages of wiki-18's lengths (a hundred words, the last of an article "
    "fewer), words by Zipf's and Mandelbrot's law; one process, a query at a time, 3 passages",
    "keyword, question": "a title and a word; with stop words of English about them",
    "at 21M": "in proportion to the passages: for tantivy more than it takes",
    "tantivy_over_bm25_questions": "questions a second",
    "drawn vectors": f"from a mixture of {COMPONENTS} components fitted to the passages' LSA "
    "vectors (384 numbers); recall@10 of 1,000 more against Flat, at the default settings",
}


def factories(vectors: int) -> dict[str, str]:
    """A factory string for each kind, Flat first."""
    lists = 1 << max(6, (vectors // 1000).bit_length())
    return {
        "flat": "Flat",
        "sq8": "SQ8",
        "ivf": f"IVF{lists},Flat",
        "ivf_sq8": f"IVF{lists},SQ8",
        "ivf_pq": f"IVF{lists},PQ96",
    }


class Scale:
    """The rows of a size, in processes of their own."""

    def __init__(
        self, processes: Processes, kept: Rows, folder: Path, cache: Path, report: Report
    ) -> None:
        self._processes, self._kept, self._report = processes, kept, report
        self._folder, self._cache = folder, cache

    def measure(self, passages: int, encoded: Path, queries: int, fresh: bool) -> dict[str, Any]:
        """All figures; `encoded`: what the mixture is fitted to. Raises RunFailed."""
        self._report(f"scale: {passages:,} passages")
        corpus = generated.corpus(self._cache, passages)
        words: dict[str, Any] = {}
        for kind in RANKERS:
            self._report(f"scale: building {kind}")
            made, cost = build(self._processes, corpus, self._cache, kind, fresh)
            self._report(f"scale: searching {kind}")
            search = partial(self._searches, kind, corpus, made, queries)
            words[kind] = cost | self._kept.get(["scale", kind, passages, queries], search)
        vectors = {}
        for name, factory in factories(passages).items():
            self._report(f"scale: vectors, {factory}")
            draw = partial(self._vectors, encoded, passages, factory)
            vectors[name] = self._kept.get(["mixture", factory, passages], draw)
        return summary(passages, words, vectors)

    def _searches(self, kind: str, corpus: Path, made: Path, queries: int) -> dict[str, Any]:
        asked = generated.queries(corpus, sum(1 for _ in corpus.open("rb")), queries)
        settings = {"index": str(made), "corpus": str(corpus), "kind": kind}
        return self._child("scale", {"settings": settings, "queries": asked})

    def _vectors(self, encoded: Path, count: int, factory: str) -> dict[str, Any]:
        code = digest_of([encoded, *sources("scripts.bench.retrieval.mixture")])
        fitted = self._cache / f"mixture-{code}.npz"
        plan = Plan(str(encoded), str(fitted), count, factory, threads=2)
        return self._child("mixture", msgspec.to_builtins(plan))

    def _child(self, module: str, plan: dict[str, Any]) -> dict[str, Any]:
        given, out = self._folder / f"{module}.plan", self._folder / f"{module}.out"
        given.write_text(json.dumps(plan), encoding="utf-8")
        out.unlink(missing_ok=True)
        command = ("-m", f"scripts.bench.retrieval.{module}", str(given), str(out))
        self._processes.run(module, *command, limit_s=SEARCH_S)
        if not out.exists():
            raise RunFailed(f"{module} ended without figures")
        return msgspec.json.decode(out.read_bytes(), type=dict[str, Any])


def summary(passages: int, words: dict[str, Any], vectors: dict[str, Any]) -> dict[str, Any]:
    """The figures of a size; each query's hits are left out, once they have been compared."""
    more = WIKI_18 / passages
    for told in words.values():
        told["at_21m"] = {
            "seconds": told["seconds"] * more,
            "file_bytes": told["file_bytes"] * more,
            **{f"{kind}_p50_s": told[kind]["p50_s"] * more for kind in ("keyword", "question")},
        }
    exact = vectors["flat"]["top10"]
    shown = {
        name: {key: value for key, value in told.items() if key != "top10"}
        | {"recall10": recall(told["top10"], exact)}
        for name, told in vectors.items()
    }
    rates = {kind: words[kind]["question"]["qps"] for kind in RANKERS}
    return {
        "scale_passages": passages,
        "tantivy_over_bm25_questions": rates["tantivy"] / rates["bm25"],
        "scale": {"words": words, "vectors": shown},
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Rankers and vectors."""
    title = f"{found['scale_passages']:,} generated passages (in brackets: at 21 million)"
    words = Table("ranker", "build s", "builder's GB", "GB on disk", "queries", "a second",
                  "ms: p50, p99", title=title)  # fmt: skip
    for kind, told in found["scale"]["words"].items():
        for asked in ("keyword", "question"):
            one, at = told[asked], told["at_21m"]
            words.add_row(
                kind,
                f"{told['seconds']:,.0f} ({at['seconds']:,.0f})",
                f"{told['peak_rss_bytes'] / 1e9:.2f}",
                f"{told['file_bytes'] / 1e9:.2f} ({at['file_bytes'] / 1e9:.1f})",
                asked,
                f"{one['qps']:,.0f}",
                f"{1000 * one['p50_s']:.2f}, {1000 * one['p99_s']:.2f} "
                f"({1000 * at[f'{asked}_p50_s']:,.0f})",
            )
    drawn = Table("drawn vectors", "build s", "GB of memory", "ms a query", "recall@10")
    for told in found["scale"]["vectors"].values():
        drawn.add_row(
            told["index"],
            f"{told['build_s']:,.0f}",
            f"{told['rss_bytes'] / 1e9:.2f}",
            f"{told['ms_per_query']:.2f}",
            f"{told['recall10']:.3f}",
        )
    return [words, drawn]


def timed(index: Index, queries: Sequence[str]) -> dict[str, float]:
    """Queries a second, one at a time, and how long they took; a few before, untold."""
    for query in queries[: len(queries) // 4]:
        index.search([query], TOP_K)
    taken = []
    for query in queries:
        begun_s = time.perf_counter()
        index.search([query], TOP_K)
        taken.append(time.perf_counter() - begun_s)
    taken.sort()
    return {
        "qps": len(taken) / sum(taken),
        "p50_s": taken[len(taken) // 2],
        "p99_s": taken[min(len(taken) - 1, int(len(taken) * 0.99))],
    }


def _measure(plan: dict[str, Any]) -> dict[str, Any]:
    from retrieval_server.index.open_index import open_index

    began_s = time.monotonic()
    _, index = open_index(msgspec.convert(plan["settings"], RetrievalConfig))
    opened_s = time.monotonic() - began_s
    found = {kind: timed(index, asked) for kind, asked in plan["queries"].items()}
    rss_bytes = status_bytes("VmRSS")
    return {"index": index.name, "open_s": opened_s, "rss_bytes": rss_bytes, **found}


if __name__ == "__main__":
    begin("scale", threads=1)
    figures = _measure(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(figures), encoding="utf-8")

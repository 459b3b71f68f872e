"""What `scripts/bench_retrieval.py` measures, row by row, and what its figures are called.

Pure: produces rows; consumes what was measured of them; waits for nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripts.bench_retrieval_run import Row

PAIR, ALL = ("ours", "aiohttp"), ("ours", "aiohttp", "requests")
OURS = ("ours",)
FEW = 256  # queries that may wait at the server "bm25-few": the others hear 503
SIBLINGS_S = 0.05  # within which the siblings of a group ask, in an open loop
Found = dict[str, Any]  # a measured row
GOALS = {  # name: (limit, whether more is better)
    "errors_at_1000": (0, False),
    "bm25_over_naive": (1.5, True),
    "bm25_groups_over_naive": (3.0, True),
    "dense_over_naive": (2.0, True),
    "added_p50_ms": (5.0, False),
    "calls_per_query": (0.5, False),
    "recall10_hnsw": (0.95, True),
    "recall10_ivf": (0.95, True),
    "different": (0, False),
}


def rows(index: str, quick: bool) -> Iterator[Row]:
    """Rows of one kind of index; its loads: closed at several concurrencies, open at several rates,
    alone and in groups of 8.
    """
    seconds = (3.0 if quick else 4.0) if index == "bm25" else 5.0
    repeats = 2 if quick else 3

    def row(name: str, sides: tuple[str, ...], times: int = repeats, **load: Any) -> Row:
        units = "groups" if "groups" in name else "single"
        return Row(f"{index} {name}", index, units, sides, {"seconds": seconds, **load}, times)

    yield row("64", PAIR if quick else ALL, 2 if quick else 5, concurrency=64)
    yield row("64 in groups", PAIR if quick else ALL, 2 if quick else 5, concurrency=64)
    yield row("idle", ("ours", "bare", "aiohttp"), 1 if quick else 3, pause_s=0.02)
    # As long as an answer takes, and longer.
    long = {"concurrency": 1000} if index == "bm25" else {"concurrency": 1000, "seconds": 12.0}
    yield row("1000", PAIR if quick else ALL, 1 if quick else repeats, **long)
    if index == "bm25":
        yield row("1000 clients", OURS, 1, concurrency=1000, clients=1000, warm_up_s=3.0)
        yield row("8 in groups", OURS if quick else PAIR, 1, concurrency=8)
        load = {"seconds": seconds, "concurrency": 1000, "clients": 1000, "warm_up_s": 3.0}
        yield Row(f"bm25 1000 clients, {FEW} may wait", "bm25-few", "single", OURS, load)
    if not quick:
        yield from _more(index, row)


def _more(index: str, row: Callable[..., Row]) -> Iterator[Row]:
    for concurrency in (1, 8, 256):
        yield row(f"{concurrency}", PAIR, concurrency=concurrency)
    yield row("1000 in groups", PAIR, 1, concurrency=1000)
    yield row("64 in groups, remembered", OURS, concurrency=64, cache_queries=8192)
    yield row("64 in groups, none shared", OURS, concurrency=64, single_flight=False)
    rates = (100, 400, 1600) if index == "bm25" else (10, 40, 120)
    for rate in rates:
        yield row(f"{rate}/s", PAIR, 1, concurrency=1000, rate=float(rate), seconds=8.0)
    groups = rates[0] / 8
    load = {"rate": groups, "spread_s": SIBLINGS_S, "concurrency": 1000, "seconds": 8.0}
    yield row(f"{groups:g} groups/s", PAIR, 1, **load)


def over_naive(found: Found) -> float | None:
    """Our queries a second over those of the baseline's better client; None: not compared."""
    naive = [side["qps"] for name, side in found["sides"].items() if name not in ("ours", "bare")]
    return found["sides"]["ours"]["qps"] / max(naive) if naive and max(naive) else None


def added_ms(found: Found, side: str) -> float:
    """By how much our p50 exceeds another way's, of an idle row."""
    sides = found["sides"]
    return float(1000 * (sides["ours"]["p50_s"] - sides[side]["p50_s"]))


def recall(found: Sequence[Sequence[int]], exact: Sequence[Sequence[int]]) -> float:
    """The mean share of each query's exact positions that were found."""
    shares = [
        len(set(some) & set(all_)) / len(all_)
        for some, all_ in zip(found, exact, strict=True)
        if all_
    ]
    return sum(shares) / len(shares)


def summary(found: list[Found], recalls: dict[str, Any]) -> dict[str, Any]:
    """The figures by name; what was not measured is None."""
    of = {each["row"]["name"]: each for each in found}
    ours = {name: each["sides"]["ours"] for name, each in of.items()}
    thousand = [side for name, side in ours.items() if "1000" in name]
    groups = [
        side["calls_per_query"]
        for name, side in ours.items()
        if name.endswith("in groups")  # nothing remembered, siblings together
    ]
    idle = [each for name, each in of.items() if name.endswith("idle")]
    bm25_thousand = [side["p99_s"] for name, side in ours.items() if name.startswith("bm25 1000")]

    def ratio(name: str) -> float | None:
        return over_naive(of[name]) if name in of else None

    return {
        "errors_at_1000": sum(side["errors"] for side in thousand),
        "refused_503_at_1000": sum(side["refused_503"] for side in thousand),
        "p99_s_at_1000": max(bm25_thousand, default=None),
        "dense_p99_s_at_1000": ours["dense 1000"]["p99_s"] if "dense 1000" in ours else None,
        "bm25_over_naive": ratio("bm25 64"),
        "bm25_groups_over_naive": ratio("bm25 64 in groups"),
        "dense_over_naive": ratio("dense 64"),
        "dense_groups_over_naive": ratio("dense 64 in groups"),
        "added_p50_ms": max((added_ms(each, "bare") for each in idle), default=None),
        "idle_over_naive_ms": max((added_ms(each, "aiohttp") for each in idle), default=None),
        "calls_per_query": max(groups, default=None),
        "recall10_hnsw": recalls.get("hnsw", {}).get("recall10"),
        "recall10_ivf": recalls.get("ivf", {}).get("recall10"),
        "compared": sum(each["compared"] for each in found),
        "different": sum(each["different"] for each in found),
    }

"""The rows of `forage bench retrieval`, and the servers and loads that measure them.

Our server and the baseline's stand side by side, one load process at a time asks one of them, in
turn and again, and medians are taken. The results of both are compared.
"""

import json
import re
import statistics
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from scripts.bench.harness import Processes, RunFailed, at_least, at_most
from scripts.bench.retrieval.load import LoadPlan

SERVE_S, ANSWER_S = 600.0, 60.0
SERVERS = {"ours": "retrieval_server.worker", "naive": "scripts.bench.retrieval.baseline"}
TOLERANCE = 1e-5  # of scores: batches add in another order
_SERVING = re.compile(r"serving .* on (http://\S+)")
_REFUSED = re.compile(r'^retrieval_requests_total\{status="503"\} (\S+)', re.MULTILINE)

PAIR, ALL = ("ours", "aiohttp"), ("ours", "aiohttp", "requests")
OURS = ("ours",)
FEW = 256  # queries that may wait at the server "bm25-few": the others hear 503
SIBLINGS_S = 0.05  # within which the siblings of a group ask, in an open loop
Figures = dict[str, Any]  # of a measured row
GOALS = {
    "errors_at_1000": at_most(0),
    "bm25_over_naive": at_least(1.5),
    "bm25_groups_over_naive": at_least(3.0),
    "dense_over_naive": at_least(2.0),
    "added_p50_ms": at_most(5.0),
    "calls_per_query": at_most(0.5),
    "recall10_hnsw": at_least(0.95),
    "recall10_ivf": at_least(0.95),
    "different": at_most(0),
}


class Row(msgspec.Struct, frozen=True):
    """A row: the same load on each of `sides`, `repeats` times in turn. `index`: which servers;
    `units`: which queries. Sides other than `ours` and `bare` ask the baseline's server.
    """

    name: str
    index: str
    units: str
    sides: tuple[str, ...]
    load: dict[str, Any]
    repeats: int = 1


def rows(index: str, quick: bool) -> Iterator[Row]:
    """Rows of a kind of index: closed at several concurrencies, open at several rates, grouped."""
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


class Bench:
    """The processes of a run and their queries; `settings`: what servers read, by index."""

    def __init__(
        self, folder: Path, processes: Processes, settings: dict[str, dict[str, Any]]
    ) -> None:
        self._folder, self._processes, self._settings = folder, processes, settings
        self._urls: dict[str, str] = {}

    def units(self, name: str, units: list[list[str]]) -> None:
        """Queries to ask for, by name."""
        (self._folder / f"{name}.json").write_text(json.dumps(units), encoding="utf-8")

    def measure(self, row: Row) -> dict[str, Any]:
        """The figures of a row. Raises RunFailed."""
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in row.sides}
        for repeat in range(row.repeats):
            for side in row.sides if repeat % 2 == 0 else reversed(row.sides):
                runs[side].append(self._load(row, side))
        if any(not run["answered"] for run in runs.get("ours", [])):
            raise RunFailed(f"nothing was answered in {row.name!r}: {runs['ours'][-1]}"[:600])
        found = {side: each[0].pop("found") for side, each in runs.items()}
        for side, each in runs.items():
            for query, results in (item for run in each[1:] for item in run.pop("found").items()):
                known = found[side].setdefault(query, [])
                known.extend(result for result in results if result not in known)
        return {
            "row": msgspec.to_builtins(row),
            "sides": {side: medians(each) for side, each in runs.items()},
            **compared(found),
        }

    def _load(self, row: Row, side: str) -> dict[str, Any]:
        server = f"{'ours' if side in ('ours', 'bare') else 'naive'}-{row.index}"
        url = self._urls.get(server) or self._serve(server)
        refused = self._refused(server, url)
        out = self._folder / "load.out"
        out.unlink(missing_ok=True)
        plan = msgspec.convert(
            {
                **row.load,
                "side": side,
                "url": url,
                "out": str(out),
                "queries": str(self._folder / f"{row.units}.json"),
            },
            LoadPlan,
        )
        limit_s = plan.warm_up_s + plan.seconds + plan.deadline_s + ANSWER_S
        words = msgspec.json.encode(plan).decode()
        self._processes.run("load", "-m", "scripts.bench.retrieval.load", words, limit_s=limit_s)
        found: dict[str, Any] = json.loads(out.read_bytes())
        begin_s = found.pop("begin_s")
        for name, process in (("server_cpu", server), ("load_cpu", "load")):
            found[name] = self._processes.cpu_share(process, begin_s, begin_s + plan.seconds)
        found["refused_503"] = self._refused(server, url) - refused
        found["server_peak_rss_bytes"] = self._processes.peak_rss_bytes[server]
        return found

    def _serve(self, server: str) -> str:
        side, _, index = server.partition("-")
        path = self._folder / f"{index}.yaml"
        path.write_text(yaml.safe_dump({"retrieval": self._settings[index]}), encoding="utf-8")
        self._processes.start(server, "-m", SERVERS[side], str(path))
        log = self._folder / f"{server}.log"
        self._processes.wait([], SERVE_S, lambda: _SERVING.search(log.read_text()) is not None)
        told = _SERVING.search(log.read_text())
        assert told is not None
        self._urls[server] = told[1]
        return told[1]

    def _refused(self, server: str, url: str) -> int:
        if server.startswith("naive"):
            return 0
        with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_S) as reply:
            told = _REFUSED.search(reply.read().decode())
        return int(float(told[1])) if told else 0


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of one side: medians; sums of what is counted; the most of what is a peak."""
    summed = ("errors", "answered", "calls", "retried", "remembered", "shared", "refused_503")
    found: dict[str, Any] = {"qps_each": [run["qps"] for run in runs]}
    for name in runs[0]:
        values = [run[name] for run in runs if run[name] is not None]
        if name in summed:
            found[name] = sum(values)
        elif name == "error_kinds":
            found[name] = {kind: count for run in runs for kind, count in run[name].items()}
        elif name == "server_peak_rss_bytes":
            found[name] = max(values)
        else:
            found[name] = statistics.median(values) if values else None
    return found


def compared(found: dict[str, dict[str, list[Any]]]) -> dict[str, int]:
    """Count the queries that ours and another side answered, and those answered otherwise."""
    ours = found.get("ours", {})
    others = {side: each for side, each in found.items() if side != "ours"}
    both = [(query, each[query]) for each in others.values() for query in ours if query in each]
    different = sum(
        not all(same(one, other) for one in ours[query] for other in results)
        for query, results in both
    )
    return {"compared": len(both), "different": different}


def same(one: list[tuple[str, float]], other: list[tuple[str, float]]) -> bool:
    """Return True if results are equal but for TOLERANCE and neighbours of equal score."""
    if len(one) != len(other):
        return False
    scores = [(a[1], b[1]) for a, b in zip(one, other, strict=True)]
    if any(abs(a - b) > TOLERANCE * max(1.0, abs(a)) for a, b in scores):
        return False
    last = one[-1][1] if one else 0.0
    theirs = dict(other)
    return all(
        a[0] == b[0] or abs(a[1] - theirs.get(a[0], last)) <= TOLERANCE * max(1.0, abs(a[1]))
        for a, b in zip(one, other, strict=True)
    )


def over_naive(found: Figures) -> float | None:
    """Our queries a second over those of the baseline's better client; None: not compared."""
    naive = [side["qps"] for name, side in found["sides"].items() if name not in ("ours", "bare")]
    return found["sides"]["ours"]["qps"] / max(naive) if naive and max(naive) else None


def added_ms(found: Figures, side: str) -> float:
    """By how much our p50 exceeds another way's, of an idle row."""
    sides = found["sides"]
    return float(1000 * (sides["ours"]["p50_s"] - sides[side]["p50_s"]))


def summary(found: list[Figures], recalls: dict[str, Any]) -> dict[str, Any]:
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

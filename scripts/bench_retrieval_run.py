"""Servers, loads and rows of `scripts/bench_retrieval.py`.

Consumes a Row; produces its figures: our server and the baseline's stand side by side, one load
process at a time asks one of them, in turn and again, and medians are taken. What both found is
compared. A finished row is a file, so that a run cut off goes on where it was.
"""

import hashlib
import json
import re
import statistics
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from scripts.bench_retrieval_load import Load
from scripts.bench_stream_run import Processes, RunFailed

REPOSITORY = Path(__file__).resolve().parent.parent
START_S, LEAVE_S = 600.0, 60.0
SERVERS = {"ours": "retrieval_server.worker", "naive": "scripts.bench_retrieval_naive"}
TOLERANCE = 1e-5  # of scores: batches add in another order
_SERVING = re.compile(r"serving .* on (http://\S+)")
_REFUSED = re.compile(r'^retrieval_requests_total\{status="503"\} (\S+)', re.MULTILINE)


class Row(msgspec.Struct, frozen=True):
    """What is measured: the same load on each of `sides`, `repeats` times in turn.

    `index`: which servers; `units`: which queries. Sides other than `ours` and `bare` ask the
    baseline's server.
    """

    name: str
    index: str
    units: str
    sides: tuple[str, ...]
    load: dict[str, Any]
    repeats: int = 1


class Rows:
    """Finished rows, each a file of `folder`. `of`: what they are figures of; rows of anything
    else are measured anew.
    """

    def __init__(self, folder: Path, of: str) -> None:
        self._folder, self._of = folder, of
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: Any, measure: Callable[[], Any]) -> Any:
        """What is on file for `key` (anything JSON), else what `measure` returns, then kept."""
        text = json.dumps([self._of, key], sort_keys=True)
        path = self._folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        found = measure()
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found), encoding="utf-8")
        new.replace(path)
        return json.loads(json.dumps(found))

    def forget(self) -> None:
        """All has been measured: the next run begins anew."""
        for path in self._folder.glob("*.json"):
            path.unlink()


def digest_of(paths: Iterable[Path]) -> str:
    """Of these files' contents."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Bench:
    """The processes of a run, and what is asked; `settings` by index: what its servers read."""

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
            for other in each[1:]:
                _merge(found[side], other.pop("found"))
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
            Load,
        )
        limit_s = plan.warm_up_s + plan.seconds + plan.deadline_s + LEAVE_S
        words = msgspec.json.encode(plan).decode()
        self._processes.start("load", "-m", "scripts.bench_retrieval_load", words)
        self._processes.wait(["load"], limit_s, lambda: False)
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
        self._processes.wait([], START_S, lambda: _SERVING.search(log.read_text()) is not None)
        told = _SERVING.search(log.read_text())
        assert told is not None
        self._urls[server] = told[1]
        return told[1]

    def _refused(self, server: str, url: str) -> int:
        if server.startswith("naive"):
            return 0
        with urllib.request.urlopen(f"{url}/metrics", timeout=LEAVE_S) as reply:
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
    """How many queries were answered by ours and by another side, and how many of them otherwise
    (by any of our answers; `found`: side → query → each different result).
    """
    ours = found.get("ours", {})
    others = {side: each for side, each in found.items() if side != "ours"}
    both = [(query, each[query]) for each in others.values() for query in ours if query in each]
    different = sum(
        not all(same(one, other) for one in ours[query] for other in results)
        for query, results in both
    )
    return {"compared": len(both), "different": different}


def same(one: list[tuple[str, float]], other: list[tuple[str, float]]) -> bool:
    """Whether two results hold the same scores, to TOLERANCE, and the same passages in the same
    order, but for neighbours of equal score.
    """
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


def _merge(into: dict[str, list[Any]], other: dict[str, list[Any]]) -> None:
    for query, results in other.items():
        known = into.setdefault(query, [])
        known.extend(result for result in results if result not in known)

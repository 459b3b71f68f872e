"""The overload part of `forage bench retrieval`: closed loops of more askers than can be served.

For an index of so many queries a second (`slowed`): its saturation, by half as many askers as it
can answer within the server's deadline; then 1, 3 and 10 times as many as that. What counts is the
goodput, queries answered within their deadline, over the saturation of the same server.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.table import Table

from scripts.bench.harness import Goal, Processes, at_least, at_most
from scripts.bench.retrieval.askers import AskersPlan

REQUEST_DEADLINE_S = 1.2  # of a search at the server
DEADLINE_S = 3.0  # of a search, from the question to its passages
SERVE_S, ANSWER_S = 600.0, 60.0
SATURATING = 0.5  # times as many askers as the deadline has room for
GOALS: dict[str, Goal] = {
    "overload_goodput_min": at_least(0.85),
    "overload_p99_over_deadline": at_most(1.0),
}
_SERVING = re.compile(r"serving .* on (http://\S+)")


class OverloadRow(msgspec.Struct, frozen=True):
    """A closed loop: `times` as many askers as the index can answer within the deadline, each
    with `together` queries a request.
    """

    queries_per_s: int
    together: int
    times: float
    seconds: float

    @property
    def name(self) -> str:
        """What is asked."""
        size = f" in requests of {self.together}" if self.together > 1 else ""
        return f"{self.queries_per_s:,} queries/s{size}, {self.times:g}x"

    @property
    def askers(self) -> int:
        """How many ask."""
        within = self.queries_per_s * REQUEST_DEADLINE_S
        return max(1, round(self.times * within / self.together))


def overload_rows(quick: bool) -> Iterator[OverloadRow]:
    """Each index at its saturation, then under more and more askers."""
    seconds = 6.0 if quick else 15.0
    for queries_per_s, together, times in (
        (50, 1, (1, 3, 10)),
        (200, 1, (1, 3, 10)),
        (3000, 8, (1, 3)),
    ):
        for each in (SATURATING, *times):
            yield OverloadRow(queries_per_s, together, each, seconds)


class Overload:
    """The slowed servers of a run, and the askers; `settings`: what the servers read."""

    def __init__(
        self, folder: Path, processes: Processes, settings: dict[str, Any], queries: list[str]
    ) -> None:
        self._folder, self._processes, self._settings = folder, processes, settings
        self._urls: dict[int, str] = {}
        self._queries = folder / "overload.json"
        self._queries.write_text(json.dumps(queries), encoding="utf-8")

    def measure(self, row: OverloadRow) -> dict[str, Any]:
        """The figures of a row. Raises RunFailed."""
        url = self._urls.get(row.queries_per_s) or self._serve(row.queries_per_s)
        out = self._folder / "askers.out"
        out.unlink(missing_ok=True)
        plan = AskersPlan(
            url=url,
            queries=str(self._queries),
            out=str(out),
            askers=row.askers,
            together=row.together,
            deadline_s=DEADLINE_S,
            seconds=row.seconds,
        )
        words = msgspec.json.encode(plan).decode()
        limit_s = plan.warm_up_s + plan.seconds + ANSWER_S
        self._processes.run(
            "askers", "-m", "scripts.bench.retrieval.askers", words, limit_s=limit_s
        )
        found: dict[str, Any] = json.loads(out.read_bytes())
        begin_s = found.pop("begin_s")
        cpu = self._processes.cpu_share
        found["load_cpu"] = cpu("askers", begin_s, begin_s + plan.seconds)
        server = f"slowed-{row.queries_per_s}"
        found["server_cpu"] = cpu(server, begin_s, begin_s + plan.seconds)
        return {"row": msgspec.to_builtins(row), "name": row.name, "askers": row.askers, **found}

    def _serve(self, queries_per_s: int) -> str:
        server = f"slowed-{queries_per_s}"
        path = self._folder / f"{server}.yaml"
        asked = self._settings | {"request_deadline_s": REQUEST_DEADLINE_S}
        path.write_text(yaml.safe_dump({"retrieval": asked}), encoding="utf-8")
        command = ("-m", "scripts.bench.retrieval.slowed", str(path), str(queries_per_s))
        self._processes.start(server, *command)
        log = self._folder / f"{server}.log"
        self._processes.wait([], SERVE_S, lambda: _SERVING.search(log.read_text()) is not None)
        told = _SERVING.search(log.read_text())
        assert told is not None
        self._urls[queries_per_s] = told[1]
        return told[1]


def goodputs(found: list[dict[str, Any]]) -> dict[str, float]:
    """By name: queries answered a second, over those at the saturation of the same index."""
    saturation = {
        row["row"]["queries_per_s"]: row["qps"]
        for row in found
        if row["row"]["times"] == SATURATING
    }
    return {
        row["name"]: row["qps"] / saturation[row["row"]["queries_per_s"]]
        for row in found
        if row["row"]["times"] != SATURATING
    }


def overload_summary(found: list[dict[str, Any]]) -> dict[str, float | None]:
    """The figures by name. The client ends a search at its deadline itself, so that the p99 of
    answered ones is beyond it only where that fails.
    """
    latest = max((row["p99_s"] for row in found if row["p99_s"] is not None), default=None)
    return {
        "overload_goodput_min": min(goodputs(found).values()),
        "overload_p99_over_deadline": None if latest is None else latest / DEADLINE_S,
    }


def overload_table(found: list[dict[str, Any]]) -> Table:
    """Every row beside its saturation."""
    ratios = goodputs(found)
    title = f"Overload (a search has {DEADLINE_S:g} s; CPU: server, askers)"
    table = Table("index", "askers", "queries/s", "goodput", "p50, p99 (s)", "failed",
                  "asked again", "CPU", title=title)  # fmt: skip
    for row in found:
        times = [row[name] for name in ("p50_s", "p99_s")]
        ratio = ratios.get(row["name"])
        table.add_row(
            row["name"],
            f"{row['askers']:,}",
            f"{row['qps']:,.1f}",
            f"{ratio:.2f}" if ratio is not None else "(saturation)",
            ", ".join("–" if each is None else f"{each:.2f}" for each in times),
            f"{row['failed']:,}",
            f"{row['retried']:,.0f}",
            f"{row['server_cpu']:.2f} {row['load_cpu']:.2f}",
        )
    return table

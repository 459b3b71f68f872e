"""The overload part: how many ask, what goodput is, and that ten times too many are answered."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.bench.harness import Processes
from scripts.bench.retrieval.askers import Tally
from scripts.bench.retrieval.overload import (
    DEADLINE_S,
    GOALS,
    SATURATING,
    Overload,
    OverloadRow,
    goodputs,
    overload_rows,
    overload_summary,
)


def found(queries_per_s: int, times: float, qps: float, p99_s: float | None) -> dict[str, Any]:
    row = OverloadRow(queries_per_s, 1, times, 1.0)
    return {"row": msgspec.to_builtins(row), "name": row.name, "qps": qps, "p99_s": p99_s}


@pytest.mark.parametrize("quick", [True, False])
def test_each_index_is_saturated_before_it_is_overloaded(quick: bool) -> None:
    rows = list(overload_rows(quick))
    asked = {(row.queries_per_s, row.times): row.askers for row in rows}
    assert [asked[200, times] for times in (SATURATING, 1, 3, 10)] == [120, 240, 720, 2400]
    assert [asked[3000, times] for times in (1, 3)] == [450, 1350]  # of 8 queries each
    assert len({row.name for row in rows}) == len(rows)
    firsts = {row.queries_per_s: row.times for row in reversed(rows)}
    assert set(firsts.values()) == {SATURATING}


def test_goodput_is_over_the_saturation_of_the_same_index() -> None:
    measured = [
        found(50, SATURATING, 40.0, 0.6),
        found(50, 10, 30.0, 1.5),
        found(200, SATURATING, 200.0, 0.6),
        found(200, 10, 180.0, None),
    ]
    assert goodputs(measured) == {"50 queries/s, 10x": 0.75, "200 queries/s, 10x": 0.9}
    told = overload_summary(measured)
    assert told == {"overload_goodput_min": 0.75, "overload_p99_over_deadline": 1.5 / DEADLINE_S}
    assert told.keys() == GOALS.keys()
    unanswered = [row | {"p99_s": None} for row in measured]
    assert overload_summary(unanswered)["overload_p99_over_deadline"] is None


def test_only_what_ends_in_the_window_counts() -> None:
    tally = Tally()
    tally.answered = [(0.9, 0.1, 8), (1.5, 0.4, 8), (1.9, 0.2, 8), (2.0, 9.0, 8)]
    tally.failed = [(0.5, "RetrievalTimeout"), (1.2, "RetrievalOverloaded")]
    told = tally.figures(1.0, 1.0)
    assert told["qps"] == 16 and told["answered"] == 2 and told["p99_s"] == 0.4
    assert told["failures"] == {"RetrievalOverloaded": 1} and told["failed"] == 1


@pytest.mark.slow
def test_ten_times_too_many_askers_are_served_as_fast_as_half_as_many(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"id": f"{i}", "contents": f"p {i}\nnumber {i % 7}"}) for i in range(50)]
    corpus.write_text("\n".join(lines))
    with Processes(tmp_path) as processes:
        queries = [f"number {i}" for i in range(999)]
        overload = Overload(tmp_path, processes, {"corpus": str(corpus)}, queries)
        measured = [overload.measure(OverloadRow(100, 1, times, 2.0)) for times in (SATURATING, 10)]
    told = overload_summary(measured)
    assert 50 < measured[0]["qps"] <= 110, "the delay is there"
    assert told["overload_goodput_min"] >= 0.6, "a busy machine is allowed for: it was below 0.2"

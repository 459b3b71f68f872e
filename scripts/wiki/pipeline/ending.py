"""The last lines of the wiki task: what training changed, what it took, and where it lies."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NEVER = ("token_mismatches", "refits", "retrieval_errors")  # more than 0 is a fault of ours


def read_summary(run: Path) -> dict[str, Any]:
    """A run's summary; empty before there is one."""
    path = run / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def is_complete(summary: Mapping[str, Any], steps: int) -> bool:
    """True for the summary of a run that has taken so many steps."""
    return summary.get("status") == "completed" and summary["steps"] >= steps


def faults(summary: Mapping[str, Any]) -> str:
    """What should never be above 0 and is, in words; '' where nothing is."""
    found = [f"{summary[name]} {name.replace('_', ' ')}" for name in NEVER if summary[name]]
    return ", ".join(found)


def lines(
    summary: Mapping[str, Any], minutes: Mapping[str, float], places: Mapping[str, Path]
) -> Iterator[str]:
    """The report; `places`: run, start, held-out questions, by their names."""
    yield f"exact match on {summary['eval_questions']} held-out questions, before and after:"
    yield f"  greedy            {_both(summary, 'em')}"
    known = [summary[f"em_{when}_by_hops"] or {} for when in ("start", "final")]
    for hops in sorted({*known[0], *known[1]} - {"0"}):
        name = f"{hops} hop{'s' * (hops != '1')}"
        yield f"    {name:<16}{_number(known[0].get(hops))} -> {_number(known[1].get(hops))}"
    yield f"  sampled (T = 1)   {_both(summary, 'sampled_em')}"
    yield f"  searches          {_both(summary, 'searches')}"
    counts = (f"{name.replace('_', ' ')} {summary[name]}" for name in NEVER)
    staleness = f"staleness {summary['staleness_max']} at most"
    yield f"{summary['steps']} steps, {staleness}, {', '.join(counts)}"
    yield f"minutes: {', '.join(f'{name} {value:.1f}' for name, value in minutes.items())}"
    yield from (f"{name}: {path}" for name, path in places.items())
    run, held_out = (shlex.quote(str(places[name])) for name in ("run", "held-out questions"))
    yield "next:"
    yield f"  forage ask {run} 'What is the capital of the country where Agra is?'"
    yield f"  forage show {run}"
    yield f"  forage evaluate {run} --sets {held_out}"


def _both(summary: Mapping[str, Any], name: str) -> str:
    start, final = (_number(summary[f"{name}_{when}"]) for when in ("start", "final"))
    return f"{start} -> {final}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"

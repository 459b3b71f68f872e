"""The goals of `forage bench wiki`: trained above what answers in one turn, untrained as trained,
and not below teaching; no faults.

A gap is the low end of one interval minus the high end of another: above 0 they do not overlap.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from scripts.bench import harness
from scripts.bench.harness import at_least, at_most
from scripts.bench.wiki.seed import SAMPLINGS, SUPERVISED, TRAINED
from scripts.wiki.pipeline.ending import NEVER

Figures = Mapping[str, Any]
_BELOW = ("no_search", "rag", "no_search_trained", "rag_trained")
_LEAST = 1e-4  # of a gap: figures have four digits
_MINUS = "minus_supervised_sampled"
GOALS = {
    **{f"over_{name}_{how}": at_least(_LEAST) for name in _BELOW for how in SAMPLINGS},
    _MINUS: at_least(0.0),
    **{name: at_most(0) for name in NEVER},
}


def reached(
    em: Figures, difference: Figures, faults: Iterable[Mapping[str, int]]
) -> dict[str, float | None]:
    """The figures that have a goal; None of what is not there yet. `faults`: of each run."""
    found: dict[str, float | None] = {}
    for name in _BELOW:
        for how in SAMPLINGS:
            found[f"over_{name}_{how}"] = _gap(em[TRAINED][how], em[name][how])
    sampled = difference[SUPERVISED]["sampled"]
    found[_MINUS] = sampled["mean"] if sampled else None
    of_runs = [*faults]
    return found | {name: sum(of[name] for of in of_runs) if of_runs else None for name in NEVER}


def goals_table(found: Figures) -> list[Table]:
    """What is reached beside the goals, where anything is; the methods' table has the intervals."""
    table = harness.goals_table(found["goals"], GOALS, title="goals of the trained model")
    return [table] if table.row_count else []


def _gap(ours: Figures | None, theirs: Figures | None) -> float | None:
    """None where not both were asked the same questions of the same seeds."""
    if not ours or not theirs:
        return None
    asked, other = ((of["questions"], of["by_seed"].keys()) for of in (ours, theirs))
    return round(ours["low"] - theirs["high"], 4) if asked == other else None

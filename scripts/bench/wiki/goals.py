"""The goals of `forage bench wiki`: trained above asking without training, and not below teaching.

A gap is the low end of one interval minus the high end of another: above 0 they do not overlap.
"""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from scripts.bench import harness
from scripts.bench.harness import at_least
from scripts.bench.wiki.seed import SAMPLINGS, SUPERVISED, TRAINED

Figures = Mapping[str, Any]
_BELOW = ("no_search", "rag")
_LEAST = 1e-4  # of a gap: figures have four digits
_MINUS = "minus_supervised_sampled"
GOALS = {
    **{f"over_{name}_{how}": at_least(_LEAST) for name in _BELOW for how in SAMPLINGS},
    _MINUS: at_least(0.0),
}


def reached(em: Figures, difference: Figures) -> dict[str, float | None]:
    """The figures that have a goal; None of what is not there yet."""
    found: dict[str, float | None] = {}
    for name in _BELOW:
        for how in SAMPLINGS:
            found[f"over_{name}_{how}"] = _gap(em[TRAINED][how], em[name][how])
    sampled = difference[SUPERVISED]["sampled"]
    return found | {_MINUS: sampled["mean"] if sampled else None}


def goals_table(found: Figures) -> list[Table]:
    """What is reached beside the goals, where anything is; the methods' table has the intervals."""
    table = harness.goals_table(found["goals"], GOALS, title="goals of the trained model")
    return [table] if table.row_count else []


def _gap(ours: Figures | None, theirs: Figures | None) -> float | None:
    return round(ours["low"] - theirs["high"], 4) if ours and theirs else None

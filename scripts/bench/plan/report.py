"""The tables of `forage bench plan`, at 80 columns."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from scripts.bench.harness import Goal, goals_table

NAME = 34  # columns of a configuration's
TOLD = {  # by name: what a table calls it, its format, and that of its error
    "tokens_per_s": ("tokens/s", "{:,.0f}", "{:+.0%}"),
    "step_s": ("seconds a step", "{:.2f}", "{:+.0%}"),
    "learner_idle": ("learner idle", "{:.2f}", "{:+.2f}"),
    "staleness": ("staleness, mean", "{:.2f}", "{:+.2f}"),
}


def tables(found: Mapping[str, Any], goals: Mapping[str, Goal], title: str) -> list[Table]:
    """Every configuration, the constants, and the goals."""
    return [
        _configurations(found["rows"], title),
        _constants(found["constants"]),
        goals_table(found, goals, ("plan_error_max", "runs_apart_max", "actors_10000_s")),
    ]


def _configurations(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = Table("configuration", title=title)
    table.add_column("", no_wrap=True)
    for name in ("run", "plan", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        names = iter(textwrap.wrap(row["name"], NAME))
        for name, (told, shown, apart) in TOLD.items():
            pair = (shown.format(row[side][name]) for side in ("run", "plan"))
            error = apart.format(row["errors"][name])
            table.add_row(next(names, ""), told, *pair, error)
        table.add_section()
    return table


def _constants(models: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("constant", *models)
    for name in next(iter(models.values()), {}):
        shown = (each[name] for each in models.values())
        table.add_row(name, *(f"{x:.3g}" if isinstance(x, float) else str(x) for x in shown))
    return table

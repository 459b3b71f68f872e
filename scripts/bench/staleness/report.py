"""The report of `forage bench staleness`: rows, table, plot and JSON.

A cell is a variant at one staleness k; its curve is the mean over seeds of sampled exact match (T =
1, held-out questions). A run that was stopped because it had collapsed keeps its last value to the
end. *Final* is the mean of the last three evaluations. A run has *collapsed* when these all lie
below half of its best one after the start, or it was stopped; it is *dead* when it ends below .05.
"Updates to reach" is read off the mean curve, straight between evaluations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from rich.table import Table

from scripts.runs.plot import save

Record = dict[str, Any]
Row = dict[str, Any]
FINAL_EVALUATIONS = 3
DEAD_BELOW = 0.05
EM = ("sampled", "sampled_1", "sampled_2", "greedy", "greedy_1", "greedy_2")


def make_row(variant: str, staleness: int, records: Sequence[Record], updates: int) -> Row:
    """One cell of the table from its finished runs (at least one), whose length is `updates`."""
    steps = _evaluated_at(records, updates)
    curves = {name: _mean_curve(records, name, len(steps)) for name in EM}
    every = [update for record in records for update in record["updates"]]
    return {
        "variant": variant,
        "staleness": staleness,
        "seeds": [record["seed"] for record in records],
        "collapsed": sum(_has_collapsed(record, len(steps)) for record in records),
        "dead": sum(_curve(r, "sampled", len(steps))[-1] < DEAD_BELOW for r in records),
        "updates": updates,
        "final": {name: _mean(curve[-FINAL_EVALUATIONS:]) for name, curve in curves.items()},
        "final_per_seed": [_mean(_curve(r, "sampled", len(steps))[-3:]) for r in records],
        "reaches_060": reaches(steps, curves["sampled"], 0.6),
        "reaches_070": reaches(steps, curves["sampled"], 0.7),
        "curve": {"update": steps, **curves},
        "ess": _mean([update["ess"] for update in every if "ess" in update]),
        "largest_ratio": max(
            (u["largest_ratio"] for u in every if "largest_ratio" in u), default=0
        ),
        "clipped": _mean([update["clipped"] for update in every if "clipped" in update]),
        "seconds_per_update": sum(record["seconds"] for record in records) / max(len(every), 1),
    }


def _evaluated_at(records: Sequence[Record], updates: int) -> list[int]:
    """The updates of a whole run's evaluations, also where every run was stopped."""
    longest = max(records, key=lambda record: len(record["evaluations"]))
    steps = [int(scores["update"]) for scores in longest["evaluations"]]
    every = steps[1] - steps[0] if len(steps) > 1 else updates
    return steps + [min(at, updates) for at in range(steps[-1] + every, updates + every, every)]


def reaches(steps: Sequence[int], curve: Sequence[float], level: float) -> float | None:
    """The first update at which the curve is at `level`, straight between evaluations; or None."""
    for i, value in enumerate(curve):
        if value >= level:
            if i == 0:
                return float(steps[0])
            share = (level - curve[i - 1]) / (value - curve[i - 1])
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return None


def summarise(rows: Sequence[Row], missing: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON file: None where runs are not there yet; `missing` names those."""
    cells = {(row["variant"], row["staleness"]): row for row in rows}

    def of(variant: str, staleness: int, name: str) -> Any:
        return cells.get((variant, staleness), {}).get(name)

    def margin(staleness: int) -> float | None:
        ours, theirs = (cells.get((variant, staleness)) for variant in ("default", "clip"))
        if not ours or not theirs or ours["seeds"] != theirs["seeds"]:
            return None
        return float(ours["final"]["sampled"] - theirs["final"]["sampled"])

    def total(rows: Sequence[Row], name: str) -> int | None:
        return sum(row[name] for row in rows) if rows else None

    at_0, at_8 = of("default", 0, "reaches_070"), of("default", 8, "reaches_070")
    alike = of("default", 0, "seeds") == of("default", 8, "seeds")
    uncorrected = [row for row in rows if row["variant"] == "none" and row["staleness"] > 0]
    return {
        "missing": list(missing),
        "collapsed_default": total([r for r in rows if r["variant"] == "default"], "collapsed"),
        "updates_ratio_at_8": at_8 / at_0 if at_0 and at_8 and alike else None,
        "margin_over_clip": {str(k): margin(k) for k in (4, 8, 16)},
        "reaches_060_at_16": {v: of(v, 16, "reaches_060") for v in ("default", "clip")},
        "worst_final_default": min(
            (em for r in rows if r["variant"] == "default" for em in r["final_per_seed"]),
            default=None,
        ),
        "collapsed_uncorrected": total(uncorrected, "collapsed"),
        "dead_uncorrected": total(uncorrected, "dead"),
        "runs_uncorrected": sum(len(row["seeds"]) for row in uncorrected),
        "final": f"mean of the last {FINAL_EVALUATIONS} evaluations, mean over seeds",
        "collapsed_means": "last evaluations all below half of the best, or stopped",
        "rows": list(rows),
    }


COLUMNS = (
    "k", "variant", "seeds", "collapsed", "sampled", "1 hop", "2 hops", "greedy 1/2",
    "to .60", "to .70", "ESS", "max ratio", "clipped", "s/update",
)  # fmt: skip


def make_table(rows: Sequence[Row]) -> Table:
    """One line per cell, by staleness."""
    table = Table(title="sampled exact match by staleness (final; mean over seeds)")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "variant" else "right")
    for row in sorted(rows, key=lambda row: row["staleness"]):
        final = row["final"]
        table.add_row(
            str(row["staleness"]),
            row["variant"],
            str(len(row["seeds"])),
            str(row["collapsed"] or "–"),
            *(f"{final[name]:.2f}" for name in ("sampled", "sampled_1", "sampled_2")),
            f"{final['greedy_1']:.2f}/{final['greedy_2']:.2f}",
            *("–" if row[name] is None else f"{row[name]:.0f}" for name in REACHES),
            f"{row['ess']:.2f}",
            f"{row['largest_ratio']:.3g}",
            f"{row['clipped']:.3f}",
            f"{row['seconds_per_update']:.2f}",
        )
    return table


REACHES = ("reaches_060", "reaches_070")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the plot: sampled exact match over updates, a panel per staleness."""
    ages = sorted({row["staleness"] for row in rows})
    across = min(3, len(ages))
    down = -(-len(ages) // across)
    figure, panels = pyplot.subplots(
        down, across, figsize=(4.6 * across, 3.4 * down), sharex=True, sharey=True, squeeze=False
    )
    names = list(dict.fromkeys(row["variant"] for row in rows))
    colours = {name: pyplot.get_cmap("tab10")(number % 10) for number, name in enumerate(names)}
    for axes, age in zip(panels.flat, ages, strict=False):
        for row in rows:
            if row["staleness"] == age:
                bold = 2.4 if row["variant"] == "default" else 1.2
                axes.plot(
                    row["curve"]["update"],
                    row["curve"]["sampled"],
                    color=colours[row["variant"]],
                    linewidth=bold,
                    label=row["variant"],
                )
        axes.set(title=f"{age} updates old", ylim=(-0.02, 1.02))
    for axes in panels[-1]:
        axes.set_xlabel("update")
    for axes in panels[:, 0]:
        axes.set_ylabel("sampled exact match")
    handles = {h.get_label(): h for axes in panels.flat for h in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    save(figure, panels.flat[: len(ages)], path, beneath=0.09)


def _has_collapsed(record: Record, length: int) -> bool:
    curve = _curve(record, "sampled", length)
    return record["collapsed"] or max(curve[-FINAL_EVALUATIONS:]) < max(curve[1:], default=0.0) / 2


def _curve(record: Record, name: str, length: int) -> list[float]:
    values = [scores[name] for scores in record["evaluations"]]
    return values + values[-1:] * (length - len(values))


def _mean_curve(records: Sequence[Record], name: str, length: int) -> list[float]:
    curves = [_curve(record, name, length) for record in records]
    return [_mean(values) for values in zip(*curves, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

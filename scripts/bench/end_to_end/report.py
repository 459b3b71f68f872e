"""The tables and the plot of `forage bench end-to-end`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.table import Table

from scripts.bench.end_to_end.figures import ENGINES, Row, ideal_token_s
from scripts.bench.end_to_end.plan import LATENCIES, MODES
from scripts.bench.end_to_end.record import Parts
from scripts.bench.harness import Goal, at_least, goals_table
from scripts.runs.plot import save

GOALS: dict[str, Goal] = {
    "async_over_lockstep": at_least(3.0),
    "async_over_overlapped": at_least(2.0),
    "async_over_ideal": at_least(0.85),
    "async_over_ideal_scaled": at_least(0.85),
    "async_over_sync_zero_latency": at_least(1.1),
}
COLUMNS = (
    "latency", "mode", "seed", "s/step", "update", "wait", "rest", "tokens/s", "s per {tokens}",
    "of ideal", "idle: learner, engines", "pause", "staleness (max)", "sampled/trained", "cores",
)  # fmt: skip
LEARNER = (("update_s", "training", "#1b6ca8"), ("wait_s", "waiting for rollouts", "#d8d8d8"),
           ("rest_s", "weights and the rest", "#c8553d"))  # fmt: skip
ENGINE = (("busy_s", "generating", "#588b8b"), ("idle_s", "idle", "#d8d8d8"))


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows of paces, by latency, mode and seed."""
    modes = list(MODES)
    paces = [row for row in rows if not row["learns"]]
    return sorted(
        paces, key=lambda r: (LATENCIES.index(r["latency"]), modes.index(r["mode"]), r["seed"])
    )


def tables(
    rows: Sequence[Row], parts: Mapping[int, Parts], found: Row, title: str, cores: int
) -> list[Table]:
    """Every cell, exact match by mode where it was measured, and the ratios beside their goals."""
    made = [_paces(in_order(rows), parts, title, cores)]
    if found["em_by_mode"]:
        made.append(_learning(found["em_by_mode"]))
    names = [*GOALS, "learner_idle", "engine_idle"]
    return [*made, goals_table(found, GOALS, names)]


def _paces(rows: Sequence[Row], parts: Mapping[int, Parts], title: str, cores: int) -> Table:
    tokens = round(sum(row["tokens"] for row in rows) / max(1, len(rows)) * 10, -2)
    columns = [name.format(tokens=f"{tokens:,.0f}") for name in COLUMNS]
    table = Table(*columns, title=title)
    for row in rows:
        ideal = parts.get(row["seed"])
        of_ideal = row["tokens_per_s"] * ideal_token_s(ideal, ENGINES, cores) if ideal else None
        table.add_row(
            row["latency"],
            row["mode"],
            str(row["seed"]),
            *(f"{row[name]:.2f}" for name in ("step_s", "update_s", "wait_s", "rest_s")),
            f"{row['tokens_per_s']:,.0f}",
            f"{tokens / row['tokens_per_s']:.1f}",
            _shown(of_ideal),
            f"{_shown(row['learner_idle'])}, {_shown(row['engine_idle'])}",
            f"{row['pause_s']:.3f}",
            f"{row['staleness']:.2f} ({row['staleness_max']:.0f})",
            f"{row['sampled_over_trained']:.2f}",
            f"{sum(row['cpu'].values()):.2f}",
        )
    return table


def _learning(by_mode: Row) -> Table:
    table = Table("mode", "seeds", "EM", "sampled EM", "EM over sync's (± 95 %)", "s to EM .9")
    for mode in sorted(by_mode, key=list(MODES).index):
        row = by_mode[mode]
        apart = row["difference"]
        width = "" if row["interval"] is None else f" ± {row['interval']:.3f}"
        reached = f" ({row['reached']} of {len(row['seeds'])})"
        table.add_row(
            mode,
            str(len(row["seeds"])),
            f"{row['em']:.3f}",
            f"{row['sampled_em']:.3f}",
            "" if apart is None else f"{apart:+.3f}{width}",
            "–" if row["em_goal_s"] is None else f"{row['em_goal_s']:.0f}{reached}",
        )
    return table


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Plot where a step's seconds go: of the learner, and of the engines; a row per latency."""
    paces = in_order(rows)
    latencies = [name for name in LATENCIES if any(row["latency"] == name for row in paces)]
    figure, panels = pyplot.subplots(
        len(latencies), 2, figsize=(10, 0.8 + 2.6 * len(latencies)), sharex="row", squeeze=False
    )
    for axes, latency in zip(panels, latencies, strict=True):
        means = [mean(group) for group in _by_mode(paces, latency)]
        _bars(axes[0], means, LEARNER)
        _bars(axes[1], means, ENGINE)
        axes[0].set_title(f"learner, latency {latency}", fontsize="medium")
        axes[1].set_title(f"engines, latency {latency}", fontsize="medium")
    for axis in panels[-1]:
        axis.set_xlabel("seconds of a step")
    handles = [h for axes in panels[0] for h in axes.get_legend_handles_labels()[0]]
    labels = [name for _, name, _ in (*LEARNER, *ENGINE)]
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return save(figure, panels.flat, path, beneath=0.06)


def _by_mode(rows: Sequence[Row], latency: str) -> list[list[Row]]:
    chosen = [row for row in rows if row["latency"] == latency]
    return [[row for row in chosen if row["mode"] == mode] for mode in _modes(chosen)]


def _modes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in rows))


def mean(rows: Sequence[Row]) -> Row:
    """The bars of a mode, in seconds of a step; of its engines 0 where nothing is known of them."""
    names = ("step_s", "update_s", "wait_s", "rest_s")
    found: Row = {name: sum(row[name] for row in rows) / len(rows) for name in names}
    seen = [(row["step_s"], row["engine_idle"]) for row in rows if row["engine_idle"] is not None]
    idle_s = sum(step_s * idle for step_s, idle in seen) / max(1, len(seen))
    busy_s = sum(step_s for step_s, _ in seen) / max(1, len(seen)) - idle_s
    return found | {"mode": rows[0]["mode"], "idle_s": idle_s, "busy_s": busy_s}


def _bars(axes: Axes, rows: Sequence[Row], parts: Sequence[tuple[str, str, str]]) -> None:
    names, left = [row["mode"] for row in rows], [0.0] * len(rows)
    for name, label, colour in parts:
        widths = [max(0.0, row[name]) for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()

"""The tables and the plot of `forage bench end-to-end`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.table import Table

from scripts.bench.end_to_end.figures import Row, of_ideal
from scripts.bench.end_to_end.record import Parts
from scripts.bench.end_to_end.task import LATENCIES, Task
from scripts.bench.harness import goals_table
from scripts.runs.plot import save

RATIOS = (
    "async_over_lockstep", "async_over_overlapped", "async_over_ideal", "async_over_ideal_scaled",
    "async_over_sync_zero_latency",
)  # fmt: skip
IDLE = ("learner_idle", "engine_idle")
COLUMNS = (
    "latency", "mode", "seed", "s/step", "update", "wait (oldest)", "rest", "tokens/s",
    "s per {tokens}", "of ideal", "idle: learner, engines", "pause", "staleness (max)",
    "sampled/trained", "search/turn", "cores",
)  # fmt: skip
LEARNER = (("update_s", "training", "#1b6ca8"), ("wait_s", "waiting for rollouts", "#d8d8d8"),
           ("rest_s", "weights and the rest", "#c8553d"))  # fmt: skip
ENGINE = (("busy_s", "generating", "#588b8b"), ("idle_s", "idle", "#d8d8d8"))


def in_order(rows: Iterable[Row], task: Task) -> list[Row]:
    """The rows of paces, by latency, mode and seed."""
    modes = list(task.modes)
    paces = [row for row in rows if not row["learns"]]
    return sorted(
        paces, key=lambda r: (LATENCIES.index(r["latency"]), modes.index(r["mode"]), r["seed"])
    )


def tables(
    rows: Sequence[Row],
    parts: Mapping[int, Parts],
    found: Row,
    task: Task,
    *,
    title: str,
    cores: int,
) -> list[Table]:
    """Every cell, exact match by mode where it was measured, and the ratios beside their goals."""
    made = [_paces(in_order(rows, task), parts, Table(title=title), task.engines, cores)]
    if found["em_by_mode"]:
        made.append(_learning(found["em_by_mode"], list(task.modes)))
    names = [*RATIOS, *(name for name in task.goals if name not in RATIOS), *IDLE]
    return [*made, goals_table(found, task.goals, names, title=_not_beside(found))]


def _not_beside(found: Row) -> str | None:
    """The modes that a ratio is not over, because they were not measured."""
    missing = [
        f"{name}: without {', '.join(of['missing'])}"
        for name, of in found["rivals"].items()
        if found[name] is not None and of["missing"]
    ]
    return "; ".join(missing) or None


def _paces(
    rows: Sequence[Row], parts: Mapping[int, Parts], table: Table, engines: int, cores: int
) -> Table:
    tokens = round(sum(row["tokens"] for row in rows) / max(1, len(rows)) * 10, -2)
    for name in COLUMNS:
        table.add_column(name.format(tokens=f"{tokens:,.0f}"))
    for row in rows:
        ideal = parts.get(row["seed"])
        share = of_ideal(row, ideal, engines, cores) if ideal else None
        table.add_row(
            row["latency"],
            row["mode"],
            str(row["seed"]),
            *(f"{row[name]:.2f}" for name in ("step_s", "update_s")),
            f"{row['wait_s']:.2f} ({row['oldest_s']:.2f})",
            f"{row['rest_s']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{tokens / pace:.1f}" if (pace := row["tokens_per_s"]) else "–",
            _shown(share),
            f"{_shown(row['learner_idle'])}, {_shown(row['engine_idle'])}",
            f"{row['pause_s']:.3f}",
            f"{row['staleness']:.2f} ({row['staleness_max']:.0f})",
            f"{row['sampled_over_trained']:.2f}",
            _shown(row["search_share"]),
            f"{sum(row['cpu'].values()):.2f}",
        )
    return table


def _learning(by_mode: Row, modes: Sequence[str]) -> Table:
    table = Table("mode", "seeds", "EM", "sampled EM", "EM over sync's (± 95 %)", "s to EM .9")
    for mode in sorted(by_mode, key=modes.index):
        row = by_mode[mode]
        apart = row["difference"]
        width = "" if row["interval"] is None else f" ± {row['interval']:.3f}"
        reached = f" ({row['reached']} of {len(row['seeds'])})"
        table.add_row(
            mode,
            str(len(row["seeds"])),
            f"{row['em']:.3f}",
            "–" if row["sampled_em"] is None else f"{row['sampled_em']:.3f}",
            "" if apart is None else f"{apart:+.3f}{width}",
            "–" if row["em_goal_s"] is None else f"{row['em_goal_s']:.0f}{reached}",
        )
    return table


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def draw(rows: Sequence[Row], task: Task, path: Path) -> Path | None:
    """Plot where a step's seconds go: of the learner, and of the engines; a row per latency. None,
    and no plot, where no pace was measured.
    """
    paces = in_order(rows, task)
    latencies = [name for name in LATENCIES if any(row["latency"] == name for row in paces)]
    if not latencies:
        return None
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

"""The tables and the plot of `forage bench wiki`."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.table import Table

from scripts.bench.wiki.seed import METHODS, SAMPLINGS, TRAINED
from scripts.command.terminal import Split
from scripts.runs.plot import save

Figures = Mapping[str, Any]
BEHAVIOUR_COLUMNS = {  # by the name of a figure of behaviour
    "searches": ("searches", "{:.2f}"),
    "words_per_query": ("query words", "{:.1f}"),
    "malformed": ("malformed", "{:.1%}"),
    "action_tokens": ("tokens", "{:.0f}"),
    "answered": ("answered", "{:.1%}"),
}
COLOURS = {"greedy": "#1b6ca8", "sampled": "#c8553d"}


def tables(found: Figures, title: str) -> list[Split]:
    """Exact match by method, by hops and kind, behaviour, and the models of each seed."""
    models = Split(_models(found))
    if not any(of[how] for of in found["em"].values() for how in SAMPLINGS):
        return [models]
    by_group, behaviour = Split(_by_group(found), keys=2), Split(_behaviour(found["behaviour"]))
    return [Split(_by_method(found, title)), by_group, behaviour, models]


def _by_method(found: Figures, title: str) -> Table:
    whole = [f"EM {how} [95 %]" for how in SAMPLINGS]
    apart = [f"{TRAINED} minus this, {how}" for how in SAMPLINGS]
    table = Table("method", "questions", *whole, *apart, title=title)
    for name in METHODS:
        of = found["em"][name]
        other = found["difference"].get(name, dict.fromkeys(SAMPLINGS))
        counts = [of[how]["questions"] for how in SAMPLINGS if of[how]]
        cells = [_with_interval(of[how], "{:.3f}") for how in SAMPLINGS]
        cells += [_with_interval(other[how], "{:+.3f}") for how in SAMPLINGS]
        table.add_row(name, str(max(counts, default="–")), *cells)
    return table


def _by_group(found: Figures) -> Table:
    table = Table("EM", "questions", *METHODS, title="greedy, sampled")
    for groups in ("by_hops", "by_kind"):
        for group, of in found[groups].items():
            named = f"{group} hop{'s' * (group != '1')}" if groups == "by_hops" else group
            cells = [", ".join(_mean(of[name][how]) for how in SAMPLINGS) for name in METHODS]
            table.add_row(named, str(of["questions"]), *cells)
        table.add_section()
    return table


def _behaviour(found: Figures) -> Table:
    columns = BEHAVIOUR_COLUMNS
    table = Table("behaviour", *(named for named, _ in columns.values()))
    for name, by_sampling in found.items():
        for how, of in by_sampling.items():
            values = [None if of is None else of[figure] for figure in columns]
            forms = [form for _, form in columns.values()]
            shown = zip(values, forms, strict=True)
            cells = ["–" if value is None else form.format(value) for value, form in shown]
            table.add_row(f"{name}, {how}", *cells)
    return table


def _models(found: Figures) -> Table:
    table = Table(
        "seed", "start: steps (sampled EM)", "supervised: steps (sampled EM)", "trained: steps",
        "reward, first and last quarter", "minutes", title="models; sampled EM of validation",
    )  # fmt: skip
    for seed, of in found["models"].items():
        reward = found["curve"].get(seed, {}).get("reward", [])
        some = max(1, len(reward) // 4)
        ends = [f"{fmean(part):.3f}" for part in (reward[:some], reward[-some:]) if part]
        table.add_row(
            seed,
            *(_chosen(of[name]) for name in ("start", "supervised")),
            str(of["trained"] or "–"),
            " -> ".join(ends) or "–",
            f"{sum(found['seconds'][seed].values()) / 60:.0f}",
        )
    return table


def _chosen(of: Figures | None) -> str:
    return "–" if of is None else f"{of['steps']} ({of['sampled_em']:.3f})"


def _with_interval(of: Figures | None, form: str) -> str:
    if of is None:
        return "–"
    low, high = (form.format(of[name]) for name in ("low", "high"))
    return f"{form.format(of['mean'])} [{low}, {high}]"


def _mean(of: Figures | None) -> str:
    return "–" if of is None else f"{of['mean']:.3f}".removeprefix("0")


def draw(found: Figures, path: Path) -> Path:
    """Plot the reward of rollouts over steps, and exact match by method."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2))
    _draw_curves(left, found["curve"])
    _draw_methods(right, found["em"])
    return save(figure, (left, right), path)


def _draw_curves(axes: Axes, curves: Figures) -> None:
    for seed, of in curves.items():
        (line,) = axes.plot(of["step"], of["reward"], alpha=0.5, label=f"seed {seed}")
        ends = [
            (e["step"], e["sampled_em"]) for e in of["evaluated"] if e["sampled_em"] is not None
        ]
        axes.plot([x for x, _ in ends], [y for _, y in ends], "o--", color=line.get_color())
    rewards = [dict(zip(of["step"], of["reward"], strict=True)) for of in curves.values()]
    if len(rewards) > 1:
        steps = sorted(set(rewards[0]).intersection(*rewards))
        means = [fmean(of[step] for of in rewards) for step in steps]
        axes.plot(steps, means, color="#222222", lw=2, label="mean")
    title = "reward of rollouts; dashed: held-out sampled EM"
    axes.set(xlabel="step", ylim=(-0.02, 1.02), title=title)
    if curves:
        axes.legend(loc="best", frameon=False)


def _draw_methods(axes: Axes, em: Figures) -> None:
    for number, how in enumerate(SAMPLINGS):
        known = [(place, em[name][how]) for place, name in enumerate(METHODS) if em[name][how]]
        means = [of["mean"] for _, of in known]
        error = [[of["mean"] - of["low"] for _, of in known]]
        error += [[of["high"] - of["mean"] for _, of in known]]
        places = [place + 0.2 * (number - 0.5) for place, _ in known]
        axes.errorbar(means, places, xerr=error, fmt="o", color=COLOURS[how], label=how)
    axes.set_yticks(range(len(METHODS)), list(METHODS))
    axes.invert_yaxis()
    axes.set(xlim=(-0.02, 1.02), title="exact match, held-out, 95 %")
    axes.legend(loc="best", frameon=False)

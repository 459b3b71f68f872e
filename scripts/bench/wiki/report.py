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
from scripts.runs.plot import save
from scripts.terminal import Split

Figures = Mapping[str, Any]
DONE = {  # by the name of a figure of behaviour
    "searches": ("searches of a rollout", "{:.2f}"),
    "words_per_query": ("words of a query", "{:.1f}"),
    "malformed": ("malformed turns", "{:.1%}"),
    "action_tokens": ("tokens sampled", "{:.0f}"),
    "answered": ("rollouts with an answer", "{:.1%}"),
}
COLOURS = {"greedy": "#1b6ca8", "sampled": "#c8553d"}


def tables(found: Figures, title: str) -> list[Split]:
    """Exact match by method, by hops and kind, behaviour, and the models of each seed."""
    evaluated = any(of[how] for of in found["em"].values() for how in SAMPLINGS)
    made = [_by_method(found, title), _behaviour(found["behaviour"])] if evaluated else []
    made = [Split(each) for each in (*made, _models(found))]
    return [*made, Split(_by_group(found), keys=2)] if evaluated else made


def _by_method(found: Figures, title: str) -> Table:
    whole = [f"EM {how} [95 %]" for how in SAMPLINGS]
    apart = [f"{TRAINED} − it, {how}" for how in SAMPLINGS]
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
    names = [f"{name}, {how}" for name in found for how in SAMPLINGS]
    table = Table("behaviour", *names)
    for figure, (named, form) in DONE.items():
        cells = []
        for of in (found[name][how] for name in found for how in SAMPLINGS):
            value = of and of[figure]
            cells.append("–" if value is None else form.format(value))
        table.add_row(named, *cells)
    return table


def _models(found: Figures) -> Table:
    table = Table(
        "seed", "start: steps (sampled EM)", "supervised: steps (sampled EM)", "trained: steps",
        "reward, first and last steps", "minutes", title="models; sampled EM of validation",
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
    if len(curves) > 1:
        shortest = min((of["step"] for of in curves.values()), key=len)
        rewards = zip(*(of["reward"] for of in curves.values()), strict=False)
        axes.plot(shortest, [fmean(each) for each in rewards], color="#222222", lw=2, label="mean")
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

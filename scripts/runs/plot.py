"""A run's learning curve, `<run>/curve.png`: exact match, reward and staleness over steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.load import ConfigError
from configs.runtime.files import replacing
from replay.log.event_log import FILE_NAME, read
from replay.log.records import EvaluationFinished, Reported
from replay.protocol import EvalResult, ReplayError
from scripts.command.options import argument
from scripts.command.terminal import clean, status
from scripts.runs.log import log_of, reading

COLOURS = {"1": "#1b6ca8", "2": "#c8553d", "3": "#588b8b"}


@dataclass(frozen=True)
class PlotOptions:
    run: Path = argument("a run directory, for example runs/latest")


def plot(options: PlotOptions) -> None:
    """Draw one run's curve. Raises ConfigError without one, ReplayError for an unreadable log."""
    log = log_of(options.run)
    with status(reading(log)):
        written = draw(options.run)
    if not written:  # of no evaluation, or nothing of the log can be read
        next(read(log), None)
        raise ConfigError(
            f"RUN = {str(options.run)!r}: no evaluation has ended in it yet, so there is no curve; "
            f"forage show {options.run} prints its rollouts"
        )
    print(clean(str(written)))


def draw(run_dir: Path) -> Path | None:
    """Write `curve.png`; None when the log holds no evaluation yet."""
    found: dict[int, EvalResult] = {}
    reported: dict[int, dict[str, float]] = {}
    try:
        for record in read(run_dir / FILE_NAME):
            if isinstance(record, EvaluationFinished):
                found[record.result.step] = record.result
            elif isinstance(record, Reported) and record.step:
                reported[record.step] = record.gauges  # of a step trained again, the last counts
    except ReplayError:
        pass  # a run that was cut off is drawn up to there
    if not found:
        return None
    evaluations = [found[step] for step in sorted(found)]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    draw_evaluations(top, evaluations)
    top.set(
        ylim=(-0.02, 1.02), ylabel="exact match (held-out)", title=plain(run_dir.resolve().name)
    )
    top.legend(loc="best", frameon=False)
    draw_reports(bottom, sorted(reported.items()))
    return save(figure, (top, bottom), run_dir / "curve.png")


def draw_evaluations(axes: Axes, evaluations: Sequence[EvalResult]) -> None:
    """Draw exact match, greedy and where it was measured sampled: of each data set, where there are
    several, else by the hops that are known.
    """
    steps = [result.step for result in evaluations]
    if len(sets := list(dict.fromkeys(name for each in evaluations for name in each.sets))) > 1:
        for name in sets:
            told = [(each.step, each.sets[name]) for each in evaluations if name in each.sets]
            at = [step for step, _ in told]
            (line,) = axes.plot(at, [found.em for _, found in told], "o-", label=plain(name))
            sampled = [found.sampled_em for _, found in told if found.sampled_em is not None]
            if len(sampled) == len(at):
                axes.plot(at, sampled, "o--", color=line.get_color(), alpha=0.6)
        return
    for hops in sorted(evaluations[0].em_by_hops):
        colour = COLOURS.get(hops, "#555555")
        name = "" if hops == "0" else f"{plain(hops)} hop{'s' * (hops != '1')}, "
        greedy = [result.em_by_hops.get(hops, 0.0) for result in evaluations]
        axes.plot(steps, greedy, "o-", color=colour, label=f"{name}greedy")
        if any(result.sampled_em_by_hops for result in evaluations):
            sampled = [result.sampled_em_by_hops.get(hops, 0.0) for result in evaluations]
            axes.plot(steps, sampled, "o--", color=colour, alpha=0.6, label=f"{name}sampled")


def plain(text: str) -> str:
    """The text as a plot shows it, in which matplotlib reads no formula."""
    return clean(text).replace("$", r"\$")


def save(figure: Figure, panels: Iterable[Axes], path: Path, beneath: float = 0.0) -> Path:
    """Write a plot with light grids and open frames; `beneath`: the share left for a legend."""
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, beneath, 1, 1))
    with replacing(path, durable=False) as draft:  # where it is a link, that alone
        figure.savefig(draft, dpi=120, format=path.suffix[1:] or "png")
    pyplot.close(figure)
    return path


def _course(
    reports: Sequence[tuple[int, Mapping[str, float]]], gauge: str
) -> tuple[list[int], list[float]]:
    """The steps that have measured it, and its values."""
    found = [(step, gauges[gauge]) for step, gauges in reports if gauge in gauges]
    return [step for step, _ in found], [value for _, value in found]


def draw_reports(axes: Axes, reports: Sequence[tuple[int, Mapping[str, float]]]) -> None:
    """Draw the reward of rollouts and staleness, of the steps that have measured them."""
    axes.plot(*_course(reports, "actor/reward"), color="#444444")
    axes.set(xlabel="step", ylabel="reward of rollouts", ylim=(-0.02, 1.02))
    stale = axes.twinx()
    stale.plot(*_course(reports, "replay/staleness"), color="#d9a441")
    stale.set_ylabel("staleness (mean)", color="#d9a441")
    stale.set_ylim(bottom=0)

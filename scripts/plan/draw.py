"""The plot of `forage plan`: where a step's seconds go, and staleness over the simulated run."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from scripts.plan.figures import Planned
from scripts.runs.plot import save

PARTS = (("update_s", "training", "#1b6ca8"), ("wait_s", "waiting for rollouts", "#d8d8d8"),
         ("rest_s", "weights and the rest", "#c8553d"))  # fmt: skip


def draw(planned: Planned, path: Path) -> Path:
    """Write it; returns the path."""
    figure, (bars, line) = pyplot.subplots(2, 1, figsize=(8, 5), height_ratios=(1, 2))
    outcomes = {"as configured": planned.outcome}
    if planned.split is not None:
        ranks, actors = planned.split.ranks, planned.split.actors
        outcomes[f"best split: {ranks} + {actors:,}"] = planned.split.outcome
    left = [0.0] * len(outcomes)
    for name, label, colour in PARTS:
        widths = [getattr(each, name) for each in outcomes.values()]
        bars.barh(list(outcomes), widths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    bars.invert_yaxis()
    bars.set(xlabel="seconds of a step", title=f"{planned.outcome.trained_per_s:,.0f} tokens/s")
    bars.legend(frameon=False, fontsize="small")
    at_s, stale = zip(*planned.outcome.timeline, strict=True)
    line.plot(at_s, stale, "o-", color="#d9a441", label="of trained tokens")
    line.axhline(planned.forecast.staleness, color="#555555", ls="--", label="published forecast")
    line.set(xlabel="seconds", ylabel="staleness (mean)")
    line.set_ylim(bottom=0)
    line.legend(frameon=False, fontsize="small")
    return save(figure, (bars, line), path)

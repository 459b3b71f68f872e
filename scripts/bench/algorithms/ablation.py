"""EMA-PG's changes taken apart on the demo task: what each alone, and all of them, are worth.

Every cell trains on trajectories exactly so many updates old, one run a seed (world, starting
policy and sampling), as `forage bench staleness` does. A cell is better or worse than the baseline
of the same staleness only where the differences of all seeds have that sign; else none is shown.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib import pyplot
from rich.table import Table

from scripts.bench.staleness.report import Record, Row, make_row
from scripts.bench.staleness.run import Job
from scripts.bench.staleness.slices import Slice
from scripts.bench.staleness.task import world_of
from scripts.runs.plot import save

AGES, SEEDS, UPDATES, EVAL_EVERY = (0, 8), (0, 1, 2, 3, 4), 60, 10
LEAST_SEEDS = 3  # a sign that they share by chance: one time in four
TOP_K = 16  # of the demo's 182 tokens; the recipe has 32 of 151,936
BASELINE, ALL = "baseline", "all four"
_BASE = (
    "learner.clip_high=0.2",
    "learner.kl_coef=0.05",
    "learner.anchor=frozen",
    "learner.kl_weight=none",
)
_CHANGES: dict[str, tuple[str, ...]] = {
    "EMA anchor": ("learner.anchor=ema", "learner.anchor_tau=0.9", "learner.anchor_period=10"),
    "top-k KL": (f"learner.kl_top_k={TOP_K}",),
    "KL weight": ("learner.kl_weight=truncate",),
    "clip-higher": ("learner.clip_high=0.28",),
}
CELLS: dict[str, tuple[str, ...]] = {
    BASELINE: _BASE,
    **{name: (*_BASE, *change) for name, change in _CHANGES.items()},
    ALL: (*_BASE, *(each for change in _CHANGES.values() for each in change)),
    "sequence weights": (*_BASE, "learner.behaviour_level=sequence"),
}
Verdict = Literal["better", "worse", "none shown"]
Key = tuple[str, int, int]  # cell, staleness, seed


class Difference(NamedTuple):
    """Of a cell from the baseline, by seed: final sampled exact match."""

    by_seed: tuple[float, ...]

    @property
    def verdict(self) -> Verdict:
        """What may be claimed: a sign that all seeds have, of three at least."""
        if len(self.by_seed) < LEAST_SEEDS:
            return "none shown"
        if all(each > 0 for each in self.by_seed):
            return "better"
        return "worse" if all(each < 0 for each in self.by_seed) else "none shown"


def plan(seeds: Sequence[int], updates: int = UPDATES) -> dict[Key, Job]:
    """Every run, seed by seed, so that what is there early can be compared; makes their worlds."""
    jobs: dict[Key, Job] = {}
    for seed in seeds:
        files = world_of(seed)
        for age in AGES:
            for name, changes in CELLS.items():
                overrides = (*files, f"learner.total_steps={updates}", *changes)
                jobs[name, age, seed] = Job(overrides, age, seed, EVAL_EVERY)
    return jobs


def label(key: Key) -> str:
    """What a line calls a run."""
    return "{}, {} updates old, seed {}".format(*key)


def rows(jobs: Mapping[Key, Job], finished: Slice, updates: int = UPDATES) -> Iterator[Row]:
    """One a cell and staleness of which a run is there, with what may be claimed of it."""
    records: dict[tuple[str, int], dict[int, Record]] = {}
    for (name, age, seed), job in jobs.items():
        if (record := finished.record(job)) is not None:
            records.setdefault((name, age), {})[seed] = record
    for (name, age), by_seed in records.items():
        row = make_row(name, age, list(by_seed.values()), updates)
        row["by_seed"] = dict(zip(row["seeds"], row.pop("final_per_seed"), strict=True))
        yield row


def compared(made: Iterable[Row]) -> list[Row]:
    """The rows with their differences from the baseline, over the seeds that both have."""
    made = list(made)
    base = {row["staleness"]: row["by_seed"] for row in made if row["variant"] == BASELINE}
    for row in made:
        own, theirs = row["by_seed"], base.get(row["staleness"], {})
        both = sorted(own.keys() & theirs.keys())
        difference = Difference(tuple(own[seed] - theirs[seed] for seed in both))
        row["difference"] = dict(zip(both, difference.by_seed, strict=True))
        row["verdict"] = None if row["variant"] == BASELINE else difference.verdict
    return made


def make_table(made: Iterable[Row]) -> Table:
    """A line per cell and staleness."""
    table = Table(title="EMA-PG taken apart: sampled exact match at the end, mean over seeds")
    for name in ("k", "cell", "seeds", "collapsed", "EM", "over baseline", "by seed", "shown"):
        table.add_column(name, justify="left" if name in ("cell", "shown") else "right")
    for row in sorted(made, key=lambda row: int(row["staleness"])):
        given = list(row["difference"].values())
        is_base = row["variant"] == BASELINE
        table.add_row(
            str(row["staleness"]),
            row["variant"],
            str(len(row["seeds"])),
            str(row["collapsed"] or "–"),
            f"{row['final']['sampled']:.3f}",
            "" if is_base or not given else f"{statistics.fmean(given):+.3f}",
            "" if is_base else " ".join(f"{each:+.2f}" for each in given),
            row["verdict"] or "",
        )
    return table


def draw(made: Sequence[Row], path: Path) -> None:
    """Write the plot: each seed's difference from the baseline, a panel per staleness."""
    names = [name for name in CELLS if name != BASELINE]
    figure, panels = pyplot.subplots(1, len(AGES), figsize=(9.2, 3.6), sharey=True, squeeze=False)
    for axes, age in zip(panels.flat, AGES, strict=True):
        axes.axvline(0.0, color="grey", linewidth=0.8)
        for row in (row for row in made if row["staleness"] == age and row["variant"] in names):
            at, given = names.index(row["variant"]), list(row["difference"].values())
            shown = row["verdict"] != "none shown"
            colour = "tab:blue" if shown else "tab:grey"
            axes.plot(given, [at] * len(given), "o", color=colour, alpha=0.6)
            if given:
                axes.plot([statistics.fmean(given)], [at], "|", color=colour, markersize=18)
        axes.set(title=f"{age} updates old", xlabel="sampled EM over the baseline's")
        axes.set_yticks(range(len(names)), names)
    panels.flat[0].invert_yaxis()
    save(figure, panels.flat, path)


def summary(jobs: Mapping[Key, Job], finished: Slice) -> dict[str, Any]:
    """All rows, and the runs that are missing."""
    missing = [label(key) for key, job in jobs.items() if finished.record(job) is None]
    return {
        "ablation": compared(rows(jobs, finished)),
        "ablation_missing": missing,
        "ablation_method": f"{UPDATES} updates, final = mean of the last three evaluations; the "
        "baseline: frozen anchor, k3++ at the sampled token, no weight on it, clip .2 on both "
        "sides, corrections of importance by token; a difference counts where all seeds agree",
    }

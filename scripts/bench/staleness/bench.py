"""The worth of each off-policy correction at each staleness, on the demo task.

Trains every variant on trajectories exactly k updates old, with three seeds each (world, starting
policy and sampling). Every finished run is a file in `--out`; the same command goes on where it was
cut off. `--minutes 30` stops in time; overrides (`learner.lr_schedule=constant`) hold for every
variant. Exit code 3: runs are left.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.load import ConfigError, load
from configs.runtime.process import REPOSITORY, Exit
from scripts.bench.harness import BenchOptions, finish
from scripts.bench.staleness.report import draw, make_row, make_table, summarise
from scripts.bench.staleness.run import Job
from scripts.bench.staleness.slices import Slice
from scripts.bench.staleness.task import world_of
from scripts.command.options import option, overrides

AGES, SEEDS, UPDATES, EVAL_EVERY = (0, 8, 16, 4, 2, 1), (0, 1, 2), 60, 10
QUICK_AGES, QUICK_VARIANTS, QUICK_UPDATES = (0, 8, 16), ("default", "clip", "none"), 50
_PLAIN = (
    "learner.objective=grpo",
    "learner.proximal=ema",
    "learner.behaviour_weight=truncate",
    "learner.behaviour_level=token",
    "learner.behaviour_cap=2.0",
    "learner.kl_coef=0.0",
    "learner.anchor=none",
)
_UNCORRECTED = (
    *_PLAIN,
    "learner.objective=reinforce",
    "learner.behaviour_weight=none",
)
_ANCHORED = (
    "learner.kl_coef=0.1",
    "learner.anchor=ema",
    "learner.anchor_tau=0.9",
    "learner.anchor_period=10",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),  # configs/demo.yaml over the schema's defaults, as they stand
    "clip": (*_PLAIN, "learner.proximal=behaviour"),
    "none": _UNCORRECTED,
    "ema.5": (*_PLAIN, "learner.proximal_decay=0.5"),
    "ema.8": (*_PLAIN, "learner.proximal_decay=0.8"),
    "ema.9": (*_PLAIN, "learner.proximal_decay=0.9"),
    "dppo_tv": (*_PLAIN, "learner.objective=dppo_tv", "learner.proximal=behaviour"),
    "start_of_update": (*_PLAIN, "learner.proximal=start_of_update"),
    "none+kl": (*_UNCORRECTED, *_ANCHORED),
}


@dataclass(frozen=True)
class BenchStalenessOptions(BenchOptions):
    """Options of `forage bench staleness`; an empty tuple or None: as many as there are."""

    overrides: tuple[str, ...] = overrides()
    quick: bool = option("k 0, 8, 16 of default, clip, none; one seed", default=False)
    variants: tuple[str, ...] = option(", ".join(VARIANTS), default=(), metavar="NAME")
    add: tuple[str, ...] = option(
        "another variant: 'ema.95=learner.proximal_decay=0.95 …'",
        default=(),
        metavar="NAME=OVERRIDES",
    )
    staleness: tuple[int, ...] = option("k, in updates", default=(), metavar="K", least=0)
    seeds: tuple[int, ...] = option("of world, start, sampling", default=(), metavar="N", least=0)
    updates: int | None = option(f"per run ({UPDATES}; quick: {QUICK_UPDATES})", least=1)
    eval_every: int = option("updates between evaluations", default=EVAL_EVERY, least=1)
    schedule: Literal["constant", "linear", "cosine"] | None = option("default: the demo's own")
    minutes: float | None = option("stop after so long (30; quick: 12), to go on later", least=0)
    workers: int = option("processes", default=2, least=1)
    out: Path = option("finished runs", default=REPOSITORY / "runs" / "bench_staleness")
    plot: Path | None = option("where to write the plot", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.known
        for name in self.names:
            if name not in known:
                raise ConfigError(f"--variants {name!r}: one of {', '.join(known)}")
            load(REPOSITORY / "configs" / "demo.yaml", (*known[name], *self.overrides))

    @property
    def known(self) -> dict[str, tuple[str, ...]]:
        """All variants by name. Raises ConfigError."""
        return VARIANTS | dict(map(_variant, self.add))

    @property
    def names(self) -> tuple[str, ...]:
        """The variants to train."""
        added = tuple(_variant(text)[0] for text in self.add)
        return self.variants or (QUICK_VARIANTS if self.quick else tuple(VARIANTS)) + added

    @property
    def ages(self) -> tuple[int, ...]:
        """The values of staleness."""
        return self.staleness or (QUICK_AGES if self.quick else AGES)

    @property
    def slice(self) -> Slice:
        """Of this run's time."""
        minutes = 12.0 if self.quick else 30.0
        return Slice(self.out, self.workers, minutes if self.minutes is None else self.minutes)

    @property
    def length(self) -> int:
        """Updates of a run."""
        return self.updates or (QUICK_UPDATES if self.quick else UPDATES)


def _variant(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, rest = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--add {text!r}: write 'NAME=a.b=c d.e=f'")
    return name, tuple(shlex.split(rest))


def plan(options: BenchStalenessOptions) -> dict[tuple[str, int, int], Job]:
    """Every (variant, staleness, seed) with its job, its files made; equal jobs are run once."""
    jobs = {}
    for seed in options.seeds or ((0,) if options.quick else SEEDS):
        common = [*world_of(seed), f"learner.total_steps={options.length}"]
        if options.schedule:
            common.append(f"learner.lr_schedule={options.schedule}")
        for age in options.ages:
            for name in options.names:
                changes = (*common, *options.known[name], *options.overrides)
                jobs[name, age, seed] = Job(changes, age, seed, options.eval_every)
    return jobs


def _label(variant: str, age: int, seed: int) -> str:
    return f"{variant} k={age} seed={seed}"


def rows(
    jobs: dict[tuple[str, int, int], Job], finished: Slice, updates: int
) -> Iterator[dict[str, Any]]:
    """One row per variant and staleness of which a run is finished."""
    for variant, age in dict.fromkeys((variant, age) for variant, age, _ in jobs):
        found = [finished.record(job) for key, job in jobs.items() if key[:2] == (variant, age)]
        if records := [record for record in found if record is not None]:
            yield make_row(variant, age, records, updates)


def report(jobs: dict[tuple[str, int, int], Job], options: BenchStalenessOptions) -> None:
    """Table, plot and JSON of what is finished."""
    finished = options.slice
    made = list(rows(jobs, finished, options.length))
    if not made:
        return
    missing = [_label(*key) for key, job in jobs.items() if finished.record(job) is None]
    summary = summarise(made, missing)
    finish(options, summary, [make_table(made)], width=140)
    for name, value in summary.items():
        if name != "rows":
            print(f"{name}: {value}")
    plot = options.plot or options.out / "staleness.png"
    draw(made, plot)
    print(f"plot: {plot}")


def bench(options: BenchStalenessOptions) -> int:
    """Run what is not finished, then report; 3 when something is left. Raises ConfigError."""
    jobs = plan(options)
    left = options.slice.run({_label(*key): job for key, job in jobs.items()})
    report(jobs, options)
    return Exit.STOPPED if left else Exit.DONE

"""What the wiki task is worth: `forage bench wiki [--minutes N] [--json FILE]`.

For each seed: the chosen start, the run of `forage demo wiki` from there, supervised learning on
all demonstrations until validation stops rising (--quick: a little over an epoch); then all of
them, `no_search` and `rag` on the same held-out questions. What is finished is kept in `--out`, in
`.cache/wiki` and in `runs`; `--minutes` ends a slice, and the same command goes on. Exit code 3:
something is left. Seeds may be measured on several machines: `--add` takes the file that each
leaves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from configs.load import ConfigError, load
from configs.runtime.files import write_durably, write_json
from configs.runtime.process import REPOSITORY, Exit
from scripts.bench import harness
from scripts.bench.wiki import figures, goals
from scripts.bench.wiki.goals import goals_table
from scripts.bench.wiki.measured import Measured, added, check_alike, keep, measured_of, path
from scripts.bench.wiki.report import draw, tables
from scripts.bench.wiki.rollouts import page
from scripts.bench.wiki.run import Slice, work
from scripts.bench.wiki.seed import (
    METHODS,
    PIECES,
    SAMPLINGS,
    TRAINED,
    Seed,
)
from scripts.bench.wiki.supervised import Schedule
from scripts.command.options import option, overrides
from scripts.setup.overrides import fields_of
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline.pipeline import CACHE, check_machine, planned
from scripts.wiki.pipeline.settings import CONFIG, WikiOptions, of_run, settings
from scripts.wiki.pipeline.start import Recipe
from scripts.wiki.wiki import build

SEEDS, QUESTIONS, QUICK_QUESTIONS = (0, 1, 2), 176, 64
QUICK_SCHEDULE = Schedule(patience=0, questions=QUICK_QUESTIONS)
_REFUSED = {
    "seed": "seed is what --seeds says: drop the override",
    "learner.total_steps": "learner.total_steps is what --steps says: drop the override",
    "run_dir": "each seed has its own run folder: drop run_dir",
}
METHOD = {
    "em": "exact match on the first held-out questions; greedy, and one sample at T = 1; a rollout "
    "whose prompt or query was too long counts as wrong, any other that failed is asked again",
    "interval": "95 %, percentile bootstrap over questions, those of all seeds together, as if "
    "they were independent, though several may need one passage: it says how much other questions "
    "would change, and nothing of other seeds, which by_seed shows; a question that two seeds hold "
    "out counts in both",
    "difference": "trained minus the other, question by question, with the same kind of interval",
    "no_search, rag": "the model as it comes, under Search-R1's prompts for these, in one turn, in "
    "which it hardly ever writes an answer in their form (behaviour: answered); …_trained: the "
    "trained model under the same prompts, in one turn as long",
    "start": "the fewest supervised steps whose sampled EM on validation is enough (docs/wiki.md)",
    "supervised": "all demonstrations from the model as it comes, at the start's settings, until "
    "sampled EM on all validation questions has not exceeded its best twice in a row after the "
    "first epoch (quick: on 64 of them, to the first measurement after it); the best model",
    "trained": "the run of forage demo wiki from the start: its last version",
    "curve": "reward of the rollouts that came in since the step before, from the run's log",
    "behaviour": "of the rollouts that ended; malformed is a share of turns",
    "goals": "over_…: the low end of trained's interval minus the high end of the other's: above 0 "
    "where they do not overlap; minus_supervised: the paired difference; none while one of both is "
    "not there of a seed; the rest: sums over the runs of all seeds",
    "code": "digests of what figures depend on; otherwise: the pieces that other code made, also "
    "in part, or forage demo wiki, which keeps no digest",
    "seconds": "wall, of start and training by their own records, of the rest over all slices",
}


@dataclass(frozen=True)
class BenchWikiOptions(harness.BenchOptions):
    """Options of `forage bench wiki`. Raises ConfigError."""

    overrides: tuple[str, ...] = overrides()
    quick: bool = option(
        "seed 0, 64 questions, 6 steps: the run of forage demo wiki --quick; supervised learning "
        "ends with its first measurement after an epoch",
        default=False,
    )
    seeds: tuple[int, ...] = option(
        "seeds to run (default 0 1 2; quick: 0)", default=(), metavar="N", least=0
    )
    steps: int | None = option("steps of training (default 36; quick: 6)", metavar="N", least=1)
    questions: int | None = option(
        f"held-out questions to ask of each seed (default {QUESTIONS}; quick: {QUICK_QUESTIONS})",
        metavar="N",
        least=1,
    )
    minutes: float = option(
        "length of a slice: three before its end what is under way is ended in order",
        default=30.0,
        least=5,
    )
    add: tuple[Path, ...] = option(
        "seeds measured elsewhere: the measured-….json of their --out", default=(), metavar="FILE"
    )
    out: Path = option(
        "folder that keeps finished measurements", default=REPOSITORY / "runs" / "bench_wiki"
    )
    plot: Path | None = option("where to write the plot", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in sorted(_REFUSED.keys() & fields_of(self.overrides)):
            raise ConfigError(_REFUSED[field])
        load(CONFIG, self.overrides)

    @property
    def schedule(self) -> Schedule:
        """Of the supervised baseline."""
        return QUICK_SCHEDULE if self.quick else Schedule()

    @property
    def wanted(self) -> list[WikiOptions]:
        """The wiki task of each seed."""
        seeds = self.seeds or SEEDS[: 1 if self.quick else None]
        return [self._task(seed) for seed in dict.fromkeys(seeds)]

    @property
    def asked(self) -> int:
        """How many held-out questions of each seed."""
        return self.questions or (QUICK_QUESTIONS if self.quick else QUESTIONS)

    @property
    def settings(self) -> dict[str, Any]:
        """What all seeds share."""
        given = of_run(self._task(0))
        steps = load(CONFIG, given).learner.total_steps
        taught = {"supervised": msgspec.to_builtins(self.schedule)} if self.quick else {}
        return {"steps": steps, "questions": self.asked, **taught, **settings(given)}

    def check_added(self, elsewhere: Mapping[int, Measured]) -> None:
        """Raise ConfigError where seeds of `add` cannot stand beside those that are wanted."""
        for number in elsewhere:
            if self.seeds and number not in self.seeds:
                raise ConfigError(f"--add, seed {number}: it is not among --seeds: name it there")
        here = self.settings
        if elsewhere.keys() >= {each.seed for each in self.wanted}:  # not on this machine's CPU
            here["model.dtype"] = next(iter(elsewhere.values())).settings["model.dtype"]
        check_alike(elsewhere, here)

    def _task(self, seed: int) -> WikiOptions:
        return WikiOptions(seed=seed, quick=self.quick, steps=self.steps, overrides=self.overrides)


def bench(options: BenchWikiOptions) -> int:
    """Make what is missing, then report; 3 when something is left. Raises ConfigError, BenchError,
    KeyboardInterrupt.
    """
    return measure(options)


def measure(
    options: BenchWikiOptions,
    cache: Path = CACHE,
    recipe: Recipe | None = None,
    schedule: Schedule | None = None,
) -> int:
    """The same; a test gives another cache, start or supervised baseline."""
    try:
        return _measure(options, cache, recipe or Recipe(), schedule or options.schedule)
    except WikiError as error:
        raise harness.BenchError(str(error)) from error


def _measure(options: BenchWikiOptions, cache: Path, recipe: Recipe, schedule: Schedule) -> int:
    report, on, time_left = harness.reporter(), harness.machine(), Slice(options.minutes)
    elsewhere = added(options.add)
    options.check_added(elsewhere)
    here = [each for each in options.wanted if each.seed not in elsewhere]
    options.out.mkdir(parents=True, exist_ok=True)
    seeds: list[Seed] = []
    failure: WikiError | None = None
    try:
        if here:
            check_machine(here[0])
        for wanted in here:
            report(f"seed {wanted.seed}: files")
            plan = planned(wanted, build(cache, wanted.seed, report), cache, recipe)
            seeds.append(Seed(wanted.seed, plan, options.out, options.asked, schedule))
            seeds[-1].check_length()
        work(seeds, time_left, report)
    except WikiError as error:
        failure = error  # after what there is
    on |= {"load_after": harness.machine()["load"]}
    measured = [measured_of(seed, options.out, options.settings, on) for seed in seeds]
    left = left_of((each.seed for each in here), seeds)
    present(options, [*measured, *elsewhere.values()], left)
    for one, seed in zip(measured, seeds, strict=True):
        keep(one, options.out, seed)
        if not one.left:
            print(f"seed {seed.number}, for --add elsewhere: {path(options.out, seed)}")
    if failure:
        raise failure
    minutes = sum(sum(seed.seconds.values()) for seed in [*measured, *elsewhere.values()]) / 60
    print(f"{minutes:.0f} minutes of work so far, over all slices")
    if left:
        print(f"{len(left)} pieces left, {left[0]} first: give the same command again to go on")
    return Exit.STOPPED if left else Exit.DONE


def left_of(wanted: Iterable[int], seeds: Iterable[Seed]) -> list[str]:
    """The pieces that are not there; of a seed that was not come to, its files."""
    left = {seed.number: seed.left for seed in seeds}
    return [f"seed {n}: {piece}" for n in wanted for piece in left.get(n, ["files"])]


def present(options: BenchWikiOptions, seeds: Sequence[Measured], left: Sequence[str]) -> None:
    """Print and write what there is."""
    seeds = [seed for seed in seeds if len(seed.left) < len(PIECES)]
    if not seeds:
        return
    otherwise = [f"seed {seed.seed}: {piece}" for seed in seeds for piece in seed.otherwise]
    code = {"digests": sorted({seed.code for seed in seeds}), "otherwise": otherwise}
    machines = {str(seed.seed): seed.machine for seed in seeds}
    found = summary(seeds)
    found |= {"left": [*left], "code": code, "machines": machines, "method": METHOD}
    harness.finish(options, found, [*tables(found, _title(seeds)), *goals_table(found)], width=190)
    if otherwise:
        print(f"made with other code, or by make wiki with whichever: {', '.join(otherwise)}")
    if len(code["digests"]) > 1:
        print("seeds are of different code: see code in the figures")
    shown = [(seed.seed, each) for seed in seeds for each in seed.shown]
    if shown:
        write_durably(options.out / "rollouts.md", page(shown))
        write_json(options.out / "rollouts.json", [{"seed": n, **each} for n, each in shown])
        print(f"rollouts before and after: {options.out / 'rollouts.md'}")
    print(f"plot: {draw(found, options.plot or options.out / 'wiki.png')}")


def summary(seeds: Sequence[Measured]) -> dict[str, Any]:
    """All figures of what is there; None where nothing is."""
    table = {
        name: {
            how: {(s.seed, id): each for s in seeds for id, each in s.outcomes[name][how].items()}
            for how in SAMPLINGS
        }
        for name in METHODS
    }
    facts = {(s.seed, id): fact for s in seeds for id, fact in s.facts.items()}
    hops = {key: str(fact.hops) for key, fact in facts.items()}
    kinds = {key: fact.kind for key, fact in facts.items()}
    em = {name: figures.per_sampling(of, figures.em, name) for name, of in table.items()}
    difference = figures.differences(table, TRAINED)
    return {
        "seeds": [seed.seed for seed in seeds],
        "em": em,
        "difference": difference,
        "goals": goals.reached(em, difference, [seed.faults for seed in seeds if seed.faults]),
        "by_hops": figures.grouped(table, hops, sorted(set(hops.values()))),
        "by_kind": figures.grouped(table, kinds, figures.by_frequency(list(kinds.values()))),
        "curve": {str(seed.seed): seed.curve for seed in seeds if seed.curve},
        "behaviour": {
            name: {how: figures.behaviour(rows) for how, rows in of.items()}
            for name, of in table.items()
        },
        "models": {str(seed.seed): seed.models for seed in seeds},
        "seconds": {str(seed.seed): seed.seconds for seed in seeds},
    }


def _title(seeds: Sequence[Measured]) -> str:
    machines = dict.fromkeys(
        ", ".join(f"{name} {value}" for name, value in seed.machine.items() if "load" not in name)
        for seed in seeds
    )
    steps = ", ".join(str(seed.steps) for seed in seeds if seed.steps) or "no"
    fewer = [f"{s.lacking} fewer than asked of seed {s.seed}; " for s in seeds if s.lacking > 0]
    where = "; ".join(machines)
    return f"held-out questions of {len(seeds)} seeds; {''.join(fewer)}{steps} steps; {where}"

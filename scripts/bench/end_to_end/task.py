"""The works of `forage bench end-to-end`: what is trained, by which schedules, about how long.

*demo*: a small model on two cores, where generation is as much of a step as training. *wiki*: a
model of 135 million parameters, whose step is nearly all the learner's, so that it has fewer cells
and steps; from the start that `forage demo wiki` has chosen, or, before there is one, from the
model as it comes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from configs.runtime.process import REPOSITORY
from scripts.bench import harness
from scripts.bench.end_to_end.record import Kind, TaskName
from scripts.bench.harness import BenchError, Report
from scripts.command.options import refusing
from scripts.demo import task as demo
from scripts.demo.errors import ColdStartFailed
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline import pipeline, settings, start
from scripts.wiki.wiki import find

LATENCIES = ("tail", "scaled", "zero")


class Mode(msgspec.Struct, frozen=True):
    """A schedule; `threads` are the learner's."""

    kind: Kind
    threads: int = 1
    engines: int = 1
    staleness: int = 0


@dataclass(frozen=True)
class TaskFiles:
    """Of a seed. `settled`: a model whose policy searches, for paces; `passages`: a corpus, or a
    folder of `forage index`; `fitting`: overrides that fit the machine.
    """

    model: Path
    settled: Path
    train: Path
    eval: Path
    passages: Path
    fitting: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """A work, its schedules and its length. Seconds are those of two cores, to tell whether a cell
    still fits a slice: of a start, of a step under the tail (`step_s`) and without (`soon_s`), of a
    whole run (`em_s`).

    `files` of a seed, made or found; `made_of`: what of them is told by neither code nor
    configuration. Both raise ConfigError for what is missing. `code`: modules that only this task
    needs; `seats` of all engines together; `in_flight` of each actor; `updates` of training alone,
    `window`: seconds before and in that of generation alone; `em_steps` and `em_every` of a whole
    run, 0 without any; `quick`: modes by latency, if any.
    """

    name: TaskName
    config: Path
    files: Callable[[int, Sequence[str], Report], TaskFiles]
    made_of: Callable[[int], str]
    code: tuple[str, ...]
    modes: Mapping[str, Mode]
    headline: str
    goals: Mapping[str, harness.Goal]
    latencies: tuple[str, ...]
    seeds: tuple[int, ...]
    warm_up: int
    steps: int
    seats: int
    in_flight: int
    updates: int
    window: tuple[float, float]
    start_s: Mapping[Kind, float]
    step_s: Mapping[Kind, float]
    soon_s: float
    parts_s: float
    quick: Mapping[str, tuple[str, ...]]
    quick_steps: int = 0
    em_steps: int = 0
    em_every: int = 0
    em_s: Mapping[Kind, float] = field(default_factory=dict)

    @property
    def engines(self) -> int:
        """Those that the ideal has: the headline mode's."""
        return self.modes[self.headline].engines

    @property
    def in_flight_alone(self) -> int:
        """Rollouts in flight of one engine alone: as many as it has seats."""
        return self.seats // self.engines


def _demo_files(seed: int, overrides: Sequence[str], report: Report) -> TaskFiles:
    from scripts.bench.overlap.task import prepare_model  # late: torch takes seconds
    from scripts.demo.start import Recipe

    try:
        files = demo.prepare(REPOSITORY / ".cache", seed, report)
    except ColdStartFailed as error:
        raise BenchError(str(error)) from error
    settled = prepare_model(files.model, Recipe().layers, report)
    return TaskFiles(files.model, settled, files.train, files.eval, files.corpus)


def _wiki_plan(seed: int) -> pipeline.Plan:
    files = find(pipeline.CACHE, seed)
    return pipeline.planned(settings.WikiOptions(seed), files, pipeline.CACHE, start.Recipe())


def _wiki_files(seed: int, overrides: Sequence[str], report: Report) -> TaskFiles:
    options = settings.WikiOptions(seed)
    pipeline.check_machine(settings.WikiOptions(seed, overrides=tuple(overrides)))
    with refusing(WikiError):
        plan = _wiki_plan(seed)
        model = start.chosen(plan.start) or plan.files.model
    report(f"from {model}")
    files, fitting = plan.files, settings.of_run(options)
    return TaskFiles(model, model, files.train, files.eval, files.index, fitting)


def _wiki_made_of(seed: int) -> str:
    with refusing(WikiError):
        plan = _wiki_plan(seed)
        if start.chosen(plan.start) is None:
            return f"{plan.files.model.name} as it comes"
        return f"{plan.start.name}, {start.read(plan.start).chosen} steps"


DEMO = Task(
    name="demo",
    config=REPOSITORY / "configs" / "demo.yaml",
    files=_demo_files,
    made_of=lambda seed: "",
    code=("scripts.demo",),
    modes={
        "lockstep": Mode("lockstep", threads=2),
        "lockstep_2_engines": Mode("lockstep", threads=2, engines=2),
        "sync": Mode("sync", threads=2),
        "sync_1_thread": Mode("sync"),
        "sync_2_engines": Mode("sync", threads=2, engines=2),
        # From here on a core each for engine and learner: of a small model one engine with all
        # rollouts costs less processor time a token than two with half of them.
        "one_step_off": Mode("ahead", staleness=1),
        "async_1": Mode("async", staleness=1),
        "async_2": Mode("async", staleness=2),
        "async_4": Mode("async", staleness=4),
        "async_8": Mode("async", staleness=8),
    },
    headline="async_8",
    goals={
        "async_over_lockstep": harness.at_least(3.0),
        "async_over_overlapped": harness.at_least(2.0),
        "async_over_ideal": harness.at_least(0.85),
        "async_over_ideal_scaled": harness.at_least(0.85),
        "async_over_sync_zero_latency": harness.at_least(1.1),
        "em_difference": harness.at_least(-0.03),
    },
    latencies=LATENCIES,
    seeds=(0, 1, 2),
    warm_up=2,
    steps=16,
    seats=256,  # two batches' rollouts
    # Where a schedule may begin more than a batch's: under the tail most wait for a search, and a
    # step of an engine costs nearly the same for few as for many.
    in_flight=384,
    updates=3,
    window=(2.0, 8.0),
    start_s={"lockstep": 30.0, "sync": 30.0, "ahead": 30.0, "async": 40.0},
    step_s={"lockstep": 4.5, "sync": 4.0, "ahead": 3.5, "async": 1.5},
    soon_s=1.8,
    parts_s=60.0,
    quick={  # of the synchronous modes those that are best at that latency on two cores
        "tail": ("lockstep_2_engines", "sync_2_engines", "async_8"),
        "scaled": ("async_8",),
        "zero": ("sync", "async_8"),
    },
    quick_steps=8,
    em_steps=80,
    em_every=10,
    # A whole run also rolls out groups without signal, which it does not train on, so that a step
    # takes longer than a pace's. Lockstep and sync are as measured; async_8 took 139 s, and modes
    # of less staleness take longer; of `ahead` there is no measurement.
    em_s={"lockstep": 860.0, "sync": 750.0, "ahead": 600.0, "async": 200.0},
)
WIKI = Task(
    name="wiki",
    config=settings.CONFIG,
    files=_wiki_files,
    made_of=_wiki_made_of,
    code=("scripts.wiki",),
    modes={  # two cores hold one engine beside the learner
        "lockstep": Mode("lockstep", threads=2),
        "sync": Mode("sync", threads=2),
        "async_2": Mode("async", threads=2, staleness=2),
    },
    headline="async_2",
    goals={
        "async_over_lockstep": harness.at_least(0.95),
        "async_over_overlapped": harness.at_least(0.95),
        "async_over_ideal": harness.at_least(0.85),
    },
    latencies=("tail",),
    seeds=(0,),
    warm_up=1,
    steps=4,
    seats=64,
    in_flight=64,
    updates=2,
    window=(10.0, 40.0),
    start_s={"lockstep": 60.0, "sync": 60.0, "async": 90.0},
    step_s={"lockstep": 100.0, "sync": 95.0, "async": 85.0},
    soon_s=90.0,
    parts_s=650.0,
    quick={},  # its parts and three cells of two steps take twice as long
)
TASKS: Mapping[TaskName, Task] = {"demo": DEMO, "wiki": WIKI}

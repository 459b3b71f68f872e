"""The latencies and cells of `forage bench end-to-end`, and the order of the cells."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist

import msgspec

from configs.load import ConfigError
from scripts.bench.end_to_end.record import Kind, TaskName
from scripts.bench.end_to_end.task import TASKS, Mode, Task, TaskFiles
from scripts.bench.overlap.server import Latency

SEARCH_SHARE = 0.05  # of a turn's generation: what a search takes beside a 3B model on a GPU
TAIL, AT_ONCE = Latency(0.2, 2.0), Latency(0.0, 0.0)
SERVER = (  # of searches: nothing is remembered, and no connection is waited for
    "retrieval.cache_queries=0",
    "retrieval.max_connections=256",
    "retrieval.timeout_s=60",
)
PACE = (  # a policy that is held as it is, as many rollouts in each step, and nothing beside them
    "learner.lr=0",
    "replay.drop_no_signal=false",
    "learner.lr_schedule=constant",
    "learner.eval_every=1000000",
    "learner.checkpoint_every=1000000",
    "learner.eval_temperature=null",
    "questions.eval_limit=4",
    "actors.drain_deadline_s=0.01",
)


BASELINE = "sync"  # exact match is paired with
RIVALS: dict[str, tuple[str, tuple[Kind, ...]]] = {  # of a ratio: its latency, their schedules
    "async_over_lockstep": ("tail", ("lockstep",)),
    "async_over_overlapped": ("tail", ("sync",)),
    "async_over_sync_zero_latency": ("zero", ("lockstep", "sync")),
}


class Cell(msgspec.Struct, frozen=True):
    """One run of the work. `steps` are counted ones; `learns`: the task's own run, evaluated, else
    the pace of a policy that learns no more.
    """

    task: TaskName
    mode: str
    latency: str
    seed: int
    steps: int
    learns: bool = False

    @property
    def of(self) -> Task:
        """The task."""
        return TASKS[self.task]

    @property
    def schedule(self) -> Mode:
        """The mode."""
        return self.of.modes[self.mode]

    @property
    def name(self) -> str:
        """The cell in words."""
        what = "to its end" if self.learns else f"{self.steps} steps"
        return f"{self.mode}, latency {self.latency}, seed {self.seed}, {what}"

    @property
    def uncounted(self) -> int:
        """The steps before those that count: by then what was rolled out ahead of the first is used
        up, or is always there.
        """
        return self.of.warm_up + self.schedule.staleness

    @property
    def last(self) -> int:
        """The last step that counts."""
        return self.of.em_steps if self.learns else self.uncounted + self.steps

    @property
    def about_s(self) -> float:
        """About what it takes on two cores."""
        task, kind = self.of, self.schedule.kind
        if self.learns:
            return task.em_s[kind]
        step_s = task.step_s[kind] if self.latency == "tail" else task.soon_s
        return task.start_s[kind] + self.last * step_s

    def overrides(self, files: TaskFiles, url: str, own: Sequence[str] = ()) -> tuple[str, ...]:
        """The configuration, searching at `url`; `own` comes last."""
        task, mode = self.of, self.schedule
        ahead = mode.staleness + 1  # nothing is rolled out for steps beyond the last planned one
        steps = self.last if self.learns else self.last + ahead
        course = (f"learner.eval_every={task.em_every}",) if self.learns else PACE
        return (
            *shared(files, files.model if self.learns else files.settled, self.seed, url),
            *course,
            f"learner.total_steps={steps}",
            f"learner.threads={mode.threads}",
            f"actors.count={mode.engines}",
            f"actors.max_num_seqs={task.seats // mode.engines}",
            f"actors.rollouts_in_flight={task.in_flight}",
            f"replay.max_staleness={mode.staleness}",
            *own,
        )


def shared(files: TaskFiles, model: Path, seed: int, url: str) -> tuple[str, ...]:
    """The same of every cell, and of the parts alone."""
    return (
        *files.fitting,
        f"seed={seed}",
        f"model.path={model}",
        f"questions.train={files.train}",
        f"questions.eval={files.eval}",
        f"retrieval.url={url}",
        *SERVER,
    )


def scaled(turn_s: float) -> Latency:
    """The latency of TAIL's shape whose mean is `SEARCH_SHARE` of a turn's generation."""
    ratio = TAIL.p99_s / TAIL.p50_s
    spread = math.log(ratio) / NormalDist().inv_cdf(0.99)
    p50_s = SEARCH_SHARE * turn_s / math.exp(spread**2 / 2)
    return Latency(p50_s, ratio * p50_s)


def latency_of(name: str, turn_s: float) -> Latency:
    """The latency of that name, beside an engine alone whose turns take `turn_s`."""
    return {"tail": TAIL, "zero": AT_ONCE, "scaled": scaled(turn_s)}[name]


def cells(
    task: Task,
    modes: Sequence[str],
    latencies: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    what: str = "all",
) -> Iterator[Cell]:
    """Every cell, seed by seed and latency by latency; the modes of a latency lie beside each
    other, in turn from the first and from the last, so that a machine that grows slower does not do
    so for the same modes each time. `what`: `pace`, `em` (at TAIL alone, where the task has whole
    runs) or `all`.
    """
    for name in modes:
        if name not in task.modes:
            raise ConfigError(f"--modes {name!r}: one of {', '.join(task.modes)}")
    for number, seed in enumerate(seeds):
        turned = modes[::-1] if number % 2 else modes
        if what != "em":
            for latency in latencies:
                yield from (Cell(task.name, mode, latency, seed, steps) for mode in turned)
        if what != "pace" and task.em_steps:
            yield from (
                Cell(task.name, mode, "tail", seed, task.em_steps, learns=True) for mode in turned
            )


def quick_cells(task: Task, seed: int, steps: int) -> Iterator[Cell]:
    """The cells of `--quick`."""
    for latency, modes in task.quick.items():
        yield from (Cell(task.name, mode, latency, seed, steps) for mode in modes)

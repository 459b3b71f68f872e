"""The schedules, latencies and cells of `forage bench end-to-end`, and the order of the cells."""

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import msgspec

from configs.load import ConfigError
from configs.runtime.process import REPOSITORY
from scripts.bench.end_to_end.record import Kind
from scripts.bench.overlap.server import Latency
from scripts.demo.task import DemoFiles

WARM_UP = 2  # steps that are not counted
SEARCH_SHARE = 0.05  # of a turn's generation: what a search takes beside a 3B model on a GPU
SEATS = 256  # of all engines together: two batches' rollouts
EM_STEPS, EM_EVERY = 80, 10
ALONE = SEATS // 2  # rollouts in flight of one engine alone, of two: as many as it has seats
# Of each actor, where a schedule may begin more rollouts than a batch's: under TAIL most wait for a
# search, and a step of an engine costs nearly the same for few as for many.
IN_FLIGHT = 256
CONFIG = REPOSITORY / "configs" / "demo.yaml"
TAIL, AT_ONCE = Latency(0.2, 2.0), Latency(0.0, 0.0)
LATENCIES = ("tail", "scaled", "zero")
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


class Mode(msgspec.Struct, frozen=True):
    """A schedule; `threads` are the learner's."""

    kind: Kind
    threads: int = 1
    engines: int = 1
    staleness: int = 0


MODES = {
    "lockstep": Mode("lockstep", threads=2),
    "lockstep_2_engines": Mode("lockstep", threads=2, engines=2),
    "sync": Mode("sync", threads=2),
    "sync_1_thread": Mode("sync"),
    "sync_2_engines": Mode("sync", threads=2, engines=2),
    "one_step_off": Mode("async", engines=2, staleness=1),
    "async_2": Mode("async", engines=2, staleness=2),
    "async_4": Mode("async", engines=2, staleness=4),
    "async_8": Mode("async", engines=2, staleness=8),
}
HEADLINE, BASELINE = "async_4", "sync"  # the asynchronous mode of the ratios; EM is paired with
RIVALS: dict[str, tuple[str, tuple[Kind, ...]]] = {  # of a ratio: its latency, their schedules
    "async_over_lockstep": ("tail", ("lockstep",)),
    "async_over_overlapped": ("tail", ("sync",)),
    "async_over_sync_zero_latency": ("zero", ("lockstep", "sync")),
}
QUICK_MODES = {  # an engine to each of two cores, as the asynchronous mode has, fills them best
    "tail": ("lockstep_2_engines", "sync_2_engines", HEADLINE),
    "scaled": (HEADLINE,),
    "zero": ("sync_2_engines", HEADLINE),
}
# About the seconds of a start and of a step on two cores, to tell whether a cell still fits.
_START_S = {"lockstep": 30.0, "sync": 30.0, "async": 50.0}
_ABOUT_S = {"lockstep": 5.0, "sync": 4.5, "async": 2.5}
_SOON_S = 3.0  # a step of any without the tail


class Cell(msgspec.Struct, frozen=True):
    """One run of the work. `steps` are counted ones; `learns`: the demo's own run, evaluated, else
    the pace of a policy that has learned to search and learns no more.
    """

    mode: str
    latency: str
    seed: int
    steps: int
    learns: bool = False

    @property
    def name(self) -> str:
        """The cell in words."""
        what = "to its end" if self.learns else f"{self.steps} steps"
        return f"{self.mode}, latency {self.latency}, seed {self.seed}, {what}"

    @property
    def last(self) -> int:
        """The last step that counts."""
        return EM_STEPS if self.learns else WARM_UP + self.steps

    @property
    def about_s(self) -> float:
        """About what it takes on two cores."""
        kind = MODES[self.mode].kind
        step_s = _ABOUT_S[kind] if self.latency == "tail" else _SOON_S
        evaluations = 12.0 * (EM_STEPS // EM_EVERY + 1) if self.learns else 0.0
        return _START_S[kind] + self.last * step_s + evaluations

    def overrides(self, files: DemoFiles, url: str, own: Sequence[str] = ()) -> tuple[str, ...]:
        """The configuration, searching at `url`; `own` comes last."""
        mode = MODES[self.mode]
        ahead = mode.staleness + 1  # nothing is rolled out for steps beyond the last
        steps = EM_STEPS if self.learns else self.last + ahead
        course = (f"learner.eval_every={EM_EVERY}",) if self.learns else PACE
        return (
            *task(files, self.seed, url),
            *course,
            f"learner.total_steps={steps}",
            f"learner.threads={mode.threads}",
            f"actors.count={mode.engines}",
            f"actors.max_num_seqs={SEATS // mode.engines}",
            f"actors.rollouts_in_flight={IN_FLIGHT}",
            f"replay.max_staleness={mode.staleness}",
            *own,
        )


def task(files: DemoFiles, seed: int, url: str) -> tuple[str, ...]:
    """The same of every cell, and of the parts alone."""
    return (
        f"seed={seed}",
        f"model.path={files.model}",
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
    modes: Sequence[str],
    latencies: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    what: str = "all",
) -> Iterator[Cell]:
    """Every cell, seed by seed and latency by latency; the modes of a latency lie beside each
    other, in turn from the first and from the last, so that a machine that grows slower does not do
    so for the same modes each time. `what`: `pace`, `em` (at TAIL alone) or `all`.
    """
    for name in modes:
        if name not in MODES:
            raise ConfigError(f"--modes {name!r}: one of {', '.join(MODES)}")
    for number, seed in enumerate(seeds):
        turned = modes[::-1] if number % 2 else modes
        if what != "em":
            for latency in latencies:
                yield from (Cell(mode, latency, seed, steps) for mode in turned)
        if what != "pace":
            yield from (Cell(mode, "tail", seed, EM_STEPS, learns=True) for mode in turned)


def quick_cells(seed: int, steps: int) -> Iterator[Cell]:
    """The six cells of `--quick`."""
    for latency, modes in QUICK_MODES.items():
        yield from (Cell(mode, latency, seed, steps) for mode in modes)

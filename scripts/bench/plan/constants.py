"""The constants of a model: by its generation alone, and by two runs that are fitted."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from scripts.bench.plan.record import Generation, Rate
from scripts.plan.workload import Latency, Shape, Turn, Workload

ENGINE, BESIDE = (0.2, 5.0), (0.8, 1.6)  # within which they are looked for
HALVINGS = 10
ROLES = ("engine", "actor", "replay", "retrieval")  # that work for an engine


class Constants(msgspec.Struct, frozen=True):
    """What `scripts.plan.build.Cores.measured` reads; `model` is a name, for people."""

    model: str
    parameters: int
    launch_s: float
    sequence_s: float
    prefill_s: float
    learn_token_s: float
    publish_s: float
    learner_cores: float
    engine_cores: float
    beside: float
    queued: float
    transfer_s: float
    pause_s: float


class Fit(NamedTuple):
    """Runs of one kind that are fitted: their figures, and their planned tokens/s by constants."""

    rows: Sequence[Mapping[str, Any]]
    tokens_per_s: Callable[[Constants], float]

    def too_slow(self, constants: Constants) -> bool:
        """True where they are planned slower than they were, on the whole."""
        paces = [row["tokens"] / row["step_s"] for row in self.rows]
        return bool(self.tokens_per_s(constants) < geometric_mean(paces))

    def mean(self, of: Callable[[Mapping[str, Any]], float]) -> float:
        """What something of a run is on average."""
        return fmean(map(of, self.rows))


def workload_of(generation: Generation, latency: Latency) -> Workload:
    """The rollouts that were measured, under a latency."""
    shapes = (
        Shape(prompt, tuple(Turn(*each) for each in turns)) for prompt, turns in generation.rollouts
    )
    return Workload(
        tuple(shapes),
        latency,
        siblings=generation.siblings,
        beside_s=generation.alone[-1].search_s,
    )


def constants_of(
    generation: Generation, serial: Fit, overlapped: Fit, *, model: str, parameters: int
) -> Constants:
    """The constants of a model. `serial`: runs whose learner and engine take turns, which tell what
    each takes undisturbed; `overlapped`: those whose learner and engine work at once, which tell by
    how much they slow each other down.
    """
    work = workload_of(generation, Latency(0.0, 0.0))
    taken_in = work.taken_in(generation.block) / work.sampled_tokens  # tokens, of a sampled one
    launch_s, sequence_s = fitted(generation.alone, generation.prefill_s * taken_in)
    update_s = serial.mean(token_s)
    found = Constants(
        model=model,
        parameters=parameters,
        launch_s=launch_s,
        sequence_s=sequence_s,
        prefill_s=generation.prefill_s,
        learn_token_s=update_s * work.sampled_tokens / work.tokens,
        publish_s=serial.mean(lambda row: row["rest_s"]),
        learner_cores=serial.mean(lambda row: row["cpu"]["learner"] / (1.0 - row["learner_idle"])),
        engine_cores=serial.mean(engine_cores),
        beside=1.0,
        queued=max(1.0, overlapped.mean(token_s) / update_s),
        transfer_s=serial.mean(way_s),
        pause_s=serial.mean(lambda row: row["pause_s"]),
    )
    found = in_run(found, serial)
    return solved(lambda x: replace(found, beside=x), overlapped, BESIDE)


def in_run(constants: Constants, fit: Fit) -> Constants:
    """The constants with an engine's step so many times longer than alone, by what its process
    does beside it in a run, that these runs are as fast as planned.
    """
    launch_s, sequence_s = constants.launch_s, constants.sequence_s
    return solved(
        lambda x: replace(constants, launch_s=x * launch_s, sequence_s=x * sequence_s), fit, ENGINE
    )


def solved(of: Callable[[float], Constants], fit: Fit, within: tuple[float, float]) -> Constants:
    """The constants of that value at which this run is as fast as planned, or of that end of the
    bounds which comes nearest, by halving. More of it is slower.
    """
    low, high = within
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fit.too_slow(of(middle)) else (middle, high)
    return of((low + high) / 2)


def way_s(row: Mapping[str, Any]) -> float:
    """Seconds of a step in which neither learner nor engine has anything to do: a version is on its
    way, leases and deliveries are. Of a run whose learner and engine take turns.
    """
    idle_s = row["engine_idle"] * row["step_s"]
    return float(max(0.0, idle_s - row["update_s"] - row["rest_s"]))


def token_s(row: Mapping[str, Any]) -> float:
    """Seconds of an update for a sampled token."""
    return float(row["update_s"] / row["tokens"])


def engine_cores(row: Mapping[str, Any]) -> float:
    """Cores of an engine and of all that works for it, while it has something to do."""
    cpu = row["cpu"]
    return float(sum(cpu.get(role, 0.0) for role in ROLES) / (1.0 - row["engine_idle"]))


def fitted(rates: Sequence[Rate], read_s: float) -> tuple[float, float]:
    """The a and b of an engine's step of n sequences, a + (b + read_s)·n seconds, which gives n
    tokens; each point by its share, and neither below 0.
    """
    n = np.array([rate.running for rate in rates])
    step_s = n / np.array([rate.tokens_per_s for rate in rates])
    slope, launch_s = np.polyfit(n, step_s, 1, w=1.0 / step_s)
    if launch_s < 0:
        return 0.0, max(0.0, float(np.mean(step_s / n)) - read_s)
    return float(launch_s), max(0.0, float(slope) - read_s)

"""The constants of a model: by its generation alone, and by two runs that are fitted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from scripts.bench.plan.record import Generation, Rate
from scripts.plan.workload import Latency, Shape, Turn, Workload

WAY_S, ENGINE, BESIDE = (0.0, 2.0), (0.05, 1.0), (0.5, 3.0)  # within which they are looked for
HALVINGS = 10


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
    transfer_s: float
    pause_s: float


class Fit(NamedTuple):
    """A run that is fitted: its figures, and its planned tokens/s by constants."""

    row: Mapping[str, Any]
    tokens_per_s: Callable[[Constants], float]

    def too_slow(self, constants: Constants) -> bool:
        """True where it is planned slower than it was."""
        return bool(self.tokens_per_s(constants) < self.row["tokens"] / self.row["step_s"])


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
    """The constants of a model. `serial`: a run whose learner and engine take turns, which tells
    what each takes undisturbed, and how long a version is on its way; `overlapped`: one whose
    learner and engine work at once, which tells by how much they slow each other down.
    """
    work, alone = workload_of(generation, Latency(0.0, 0.0)), serial.row
    read = (work.tokens - work.sampled_tokens) / work.sampled_tokens  # tokens, of a sampled one
    launch_s, sequence_s = fitted(generation.alone, generation.prefill_s * read)
    found = Constants(
        model=model,
        parameters=parameters,
        launch_s=launch_s,
        sequence_s=sequence_s,
        prefill_s=generation.prefill_s,
        learn_token_s=alone["update_s"] / (alone["tokens"] * (1.0 + read)),
        publish_s=alone["rest_s"],
        learner_cores=alone["cpu"]["learner"] / (1.0 - alone["learner_idle"]),
        engine_cores=engine_cores(generation.alone[-1].cores, overlapped.row["cpu"]),
        beside=1.0,
        transfer_s=0.0,
        pause_s=alone["pause_s"],
    )
    found = slower(found, serial) if not serial.too_slow(found) else faster(found, serial)
    return solved(lambda x: replace(found, beside=x), overlapped, BESIDE)


def slower(constants: Constants, fit: Fit) -> Constants:
    """The constants with versions so long on their way that this run is as fast as planned."""
    return solved(lambda x: replace(constants, transfer_s=x), fit, WAY_S)


def faster(constants: Constants, fit: Fit) -> Constants:
    """The constants with an engine so much faster than alone that this run is as planned."""
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


def engine_cores(alone: float, cpu: Mapping[str, float]) -> float:
    """Cores of an engine and of all that works for it: as alone, or, where a run's other processes
    take more beside an engine, by them; `cpu`: its processor seconds a second by role.
    """
    others = sum(used for role, used in cpu.items() if role not in ("engine", "learner"))
    return max(alone, 1.0 + others / cpu["engine"]) if cpu.get("engine") else alone


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

"""The constants of a model: by its parts alone, and by the one run that is fitted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from scripts.bench.plan.record import Parts, Rate
from scripts.plan.workload import Latency, Shape, Turn, Workload

LEAST, MOST, HALVINGS = 0.8, 3.0, 10  # of `beside`


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


def workload_of(parts: Parts, latency: Latency) -> Workload:
    """The rollouts that were measured, under a latency."""
    shapes = (
        Shape(prompt, tuple(Turn(*each) for each in turns))
        for prompt, turns in parts.generation.rollouts
    )
    made = parts.generation
    return Workload(
        tuple(shapes), latency, siblings=made.siblings, beside_s=made.alone[-1].search_s
    )


def constants_of(
    parts: Parts, run: Mapping[str, Any], model: str, parameters: int, step_s: Callable[..., float]
) -> Constants:
    """The constants of a model. `run`: the row of the run that is fitted; `step_s(constants)`: the
    seconds of its step as they are planned.
    """
    work = workload_of(parts, Latency(0.0, 0.0))
    read = (work.tokens - work.sampled_tokens) / work.sampled_tokens  # tokens, of a sampled one
    made, learnt = parts.generation, parts.training
    launch_s, sequence_s = fitted(made.alone, made.prefill_s * read)
    slower = max(1.0, run["update_s"] / learnt.update_s)  # in a run than alone
    found = Constants(
        model=model,
        parameters=parameters,
        launch_s=launch_s,
        sequence_s=sequence_s,
        prefill_s=made.prefill_s,
        learn_token_s=learnt.update_s / learnt.tokens,
        publish_s=run["rest_s"] / slower,
        learner_cores=learnt.cpu_s / learnt.update_s,
        engine_cores=engine_cores(made.alone[-1].cores, run["cpu"]),
        beside=1.0,
        transfer_s=max(0.0, run["sent_s"] - run["pause_s"]),
        pause_s=run["pause_s"],
    )

    def at(beside: float) -> float:
        return step_s(msgspec.structs.replace(found, beside=beside))

    return msgspec.structs.replace(found, beside=solved(at, run["step_s"]))


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


def solved(rising: Callable[[float], float], wanted: float) -> float:
    """Where a rising function has this value, from LEAST to MOST, by halving."""
    low, high = LEAST, MOST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > wanted else (middle, high)
    return (low + high) / 2

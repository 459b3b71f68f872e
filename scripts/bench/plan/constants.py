"""The constants of a model by its parts: arithmetic."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from configs.load import load
from scripts.bench.plan.cells import CONFIG
from scripts.bench.plan.record import Parts, Rate
from scripts.plan.build import transfer_s
from scripts.plan.hardware import CORE_PAUSE_S
from scripts.plan.workload import Latency, Shape, Turn, Workload

WIDTH = 4  # bytes of a weight: the demo computes in float32


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
        Shape(prompt, tuple(Turn(*each) for each in turns)) for prompt, turns in parts.rollouts
    )
    return Workload(tuple(shapes), latency)


def constants_of(parts: Parts, model: str, parameters: int, cores: float) -> Constants:
    """The constants of a model on so many cores."""
    work = workload_of(parts, Latency(0.0, 0.0))
    read = (work.tokens - work.sampled_tokens) / work.sampled_tokens  # tokens, of a sampled one
    launch_s, sequence_s = fitted(parts.alone, parts.prefill_s * read)
    engine_cores = parts.alone[-1].cores
    learner_cores = parts.training.cpu_s / parts.training.update_s
    return Constants(
        model=model,
        parameters=parameters,
        launch_s=launch_s,
        sequence_s=sequence_s,
        prefill_s=parts.prefill_s,
        learn_token_s=parts.training.update_s / (len(parts.rollouts) * work.tokens),
        publish_s=parts.training.publish_s,
        learner_cores=learner_cores,
        engine_cores=engine_cores,
        beside=beside(parts, cores / (engine_cores + learner_cores)),
        transfer_s=transfer_s(load(CONFIG), WIDTH * parameters, "gloo"),
        pause_s=CORE_PAUSE_S,
    )


def fitted(rates: Sequence[Rate], read_s: float) -> tuple[float, float]:
    """The a and b of an engine's step of n sequences, a + (b + read_s)·n seconds, which gives n
    tokens; each point by its share, and neither below 0.
    """
    n = np.array([rate.in_flight for rate in rates], float)
    step_s = n / np.array([rate.tokens_per_s for rate in rates])
    slope, launch_s = np.polyfit(n, step_s, 1, w=1.0 / step_s)
    if launch_s < 0:
        return 0.0, max(0.0, float(np.mean(step_s / n)) - read_s)
    return float(launch_s), max(0.0, float(slope) - read_s)


def beside(parts: Parts, share: float) -> float:
    """By how much generation and training slow each other down, beyond their shares of the cores;
    the geometric mean of both.
    """
    slower = parts.alone[-1].tokens_per_s / parts.beside.tokens_per_s
    longer = parts.update_beside_s / parts.training.update_s
    return max(1.0, math.sqrt(slower * longer) * min(1.0, share))

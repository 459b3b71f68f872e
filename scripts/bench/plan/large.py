"""The seconds of one core that a plan of a large fleet takes: ten thousand actors of eight rollouts
each, half a million rollouts in all.
"""

import time
from typing import NamedTuple

from scripts.plan.hardware import replay_per_s
from scripts.plan.scenario import Decode, Engines, Learner, Rules, Scenario, Sync
from scripts.plan.simulation import simulate
from scripts.plan.workload import Latency, Means, Workload

ACTORS, EACH, ROLLOUTS = 10_000, 8, 500_000


class Took(NamedTuple):
    """Processor and wall seconds, and rollouts that were trained on."""

    cpu_s: float
    wall_s: float
    rollouts: int


def large(actors: int = ACTORS, rollouts: int = ROLLOUTS) -> Took:
    """Simulate a fleet of Search-R1's kind on large GPUs."""
    work = Workload(Means(300, 1.5, 4, 100, 500, 480, 4096).shapes(0), Latency(0.2, 2.0))
    groups = actors // EACH
    of = Scenario(
        work,
        Engines(actors, EACH, EACH, Decode(0.01, 0.01, 1e-4, 1e-4), prefill_s=1e-5),
        Learner(step_s=1.0, publish_s=0.1),
        Rules(groups, EACH, max_staleness=4),
        Sync(0.5, 0.05),
        delivery_s=1.0 / replay_per_s(actors, work.tokens),
    )
    steps = -(-rollouts // of.batch)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    simulate(of, steps=steps, warm_up=0)
    return Took(time.process_time() - cpu_s, time.perf_counter() - wall_s, steps * of.batch)

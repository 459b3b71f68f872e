"""Small scenarios whose outcome can be reckoned by hand."""

from typing import Any

from scripts.plan.scenario import Decode, Engines, Learner, Machine, Rules, Scenario, Sync
from scripts.plan.workload import Latency, Means, Turn, Workload, alike

TOKEN_S = 0.01
AT_ONCE, APART = Sync(), Machine()


def scenario(
    workload: Workload | None = None,
    *,
    actors: int = 1,
    capacity: int = 64,
    seats: int = 64,
    sequence_s: float = 0.0,
    prefill_s: float = 0.0,
    update_s: float = 1.0,
    publish_s: float = 0.0,
    groups: int = 4,
    size: int = 4,
    staleness: int = 0,
    every: int = 1,
    recompute: bool = True,
    sync: Sync = AT_ONCE,
    machine: Machine = APART,
    **others: Any,
) -> Scenario:
    """One whose engine gives every sequence a token each 10 ms, unless told otherwise."""
    return Scenario(
        workload or alike(10, [Turn(50, 20, searches=True), Turn(30)], latency_s=0.5),
        Engines(actors, capacity, seats, Decode(TOKEN_S, 0.0, sequence_s), prefill_s),
        Learner(step_s=update_s, publish_s=publish_s),
        Rules(groups, size, staleness, every, recompute),
        sync,
        machine,
        **others,
    )


def varied(no_signal: float = 0.0) -> Workload:
    """Rollouts of Search-R1's kind, with a tail of latencies."""
    shapes = Means(300, 1.5, 4, 100, 400, 480, 4000).shapes(0, 500)
    return Workload(shapes, Latency(0.2, 2.0), no_signal)

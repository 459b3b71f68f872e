"""The best split of GPUs between learner and engines.

Every split that fits the GPUs' memory is rated by what its slower side could do. Those that rate
best are simulated, and the configuration's own; the one that trains most tokens a second is the
best.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from configs.schema import Config
from scripts.plan.build import on_gpus
from scripts.plan.hardware import Gpu
from scripts.plan.outcome import Outcome
from scripts.plan.scenario import Scenario
from scripts.plan.simulation import simulate, unheld
from scripts.plan.workload import Workload
from scripts.setup.fit import fitted, least_cache_bytes
from scripts.setup.gpu_memory import tenants
from scripts.setup.model_size import Model

CANDIDATES = 24  # numbers of ranks that are looked at
SIMULATED = 3
ROLLOUTS = 40_000  # of a candidate's simulation, about
ALONE = 400  # rollouts by which an engine alone is rated


@dataclass(frozen=True)
class Split:
    """So many GPUs for the learner, the others for engines; `config` fits them."""

    config: Config
    scenario: Scenario
    outcome: Outcome

    @property
    def ranks(self) -> int:
        """GPUs of the learner."""
        return self.config.learner.ranks

    @property
    def actors(self) -> int:
        """Engines."""
        return self.config.actors.count


def splits(
    config: Config, model: Model, gpu: Gpu, gpus: int, workload: Workload
) -> Iterator[tuple[Config, Scenario]]:
    """Yield the splits that fit in memory, with a GPU for each rank and each worker."""
    workers = config.actors.tensor_parallel
    most = gpus - workers
    stride = max(1, most // CANDIDATES)
    for ranks in range(1, most + 1, stride):
        learner = msgspec.structs.replace(config.learner, ranks=ranks)
        actors = msgspec.structs.replace(
            config.actors, count=(gpus - ranks) // workers, kv_cache_bytes=0
        )
        if ranks > 1 and not learner.zero_stage:
            continue
        split = msgspec.structs.replace(config, learner=learner, actors=actors)
        split = fitted(split, [gpu.total] * gpus, model)
        if fits(split, model, gpu, gpus):
            yield split, on_gpus(split, model, gpu, gpus, workload)


def fits(config: Config, model: Model, gpu: Gpu, gpus: int) -> bool:
    """True where every GPU holds what lies on it, and every engine a group's contexts."""
    if config.actors.kv_cache_bytes < least_cache_bytes(config, model):
        return False
    held = tenants(config, model, gpus)
    return all(sum(sum(n.values()) for n in each.values()) <= gpu.total for each in held)


def best_split(
    config: Config, model: Model, gpu: Gpu, gpus: int, workload: Workload, *, seed: int = 0
) -> Split | None:
    """The split that trains most tokens a second; None where none fits."""
    found = list(splits(config, model, gpu, gpus, workload))
    rates: dict[int, float] = {}  # of an engine alone, by its capacity
    for _, scenario in found:
        capacity = scenario.engines.capacity
        if capacity not in rates:
            rates[capacity] = alone_per_s(scenario, seed)
    found.sort(key=lambda each: -rated(each[1], rates[each[1].engines.capacity]))
    own = [each for each in found[SIMULATED:] if each[0].learner.ranks == config.learner.ranks]
    tried = [
        Split(split, scenario, simulate(scenario, **length(scenario, ROLLOUTS), seed=seed))
        for split, scenario in found[:SIMULATED] + own
    ]
    return max(tried, key=lambda split: split.outcome.trained_per_s, default=None)


def alone_per_s(scenario: Scenario, seed: int) -> float:
    """Rollouts/s of one of its engines, which nothing holds up."""
    one = replace(scenario, engines=replace(scenario.engines, count=1))
    wanted = max(ALONE, 4 * scenario.engines.capacity)
    return unheld(one, steps=-(-wanted // scenario.batch) + 1, seed=seed).rollouts_per_s


def rated(scenario: Scenario, engine_per_s: float) -> float:
    """Rollouts/s of its slower side, or of what admission lets be in flight."""
    learner = scenario.batch / (scenario.update_s + scenario.learner.publish_s)
    kept = 1.0 - scenario.workload.no_signal
    admitted = (scenario.rules.max_staleness + 1) * scenario.batch
    in_flight = scenario.engines.count * scenario.engines.capacity
    engines = scenario.engines.count * engine_per_s * min(1.0, admitted / in_flight)
    return min(learner, kept * engines)


def length(scenario: Scenario, rollouts: int, steps: int = 20) -> dict[str, int]:
    """`steps` and `warm_up` of a simulation of at most about so many rollouts: until what was begun
    before the first step is used up, then enough to count.
    """
    warm_up = scenario.rules.max_staleness + 2 * scenario.rules.publish_every
    most = max(4, rollouts // scenario.batch - warm_up)
    return {"steps": min(steps, most), "warm_up": warm_up}

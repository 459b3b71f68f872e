"""A scenario: all that one simulation depends on, and nothing else."""

from dataclasses import dataclass

from scripts.plan.workload import Workload

UNLIMITED = float("inf")


@dataclass(frozen=True)
class Decode:
    """The seconds of an engine's step that gives each of `n` running sequences a token: `launch_s`
    and the longer of moving (weights, and each sequence's keys and values) and computing.
    """

    launch_s: float
    moved_s: float = 0.0
    sequence_s: float = 0.0
    computed_s: float = 0.0

    def step_s(self, n: int) -> float:
        """Seconds of a step with n sequences."""
        return self.launch_s + max(self.moved_s + n * self.sequence_s, n * self.computed_s)


@dataclass(frozen=True)
class Engines:
    """The actors' engines, all alike: `capacity` rollouts in flight in each, `seats` of which
    generate at once; `prefill_s` of a token that is taken in; `cores` that one keeps busy; `block`:
    tokens of a block of its cache, of which only whole ones are found again.
    """

    count: int
    capacity: int
    seats: int
    decode: Decode
    prefill_s: float = 0.0
    cores: float = 1.0
    block: int = 1


@dataclass(frozen=True)
class Learner:
    """Seconds of a step: `step_s`, and `token_s` for each token of its rollouts' contexts; then
    `publish_s` for putting a version out; `cores` that it keeps busy meanwhile.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    publish_s: float = 0.0
    cores: float = 1.0


@dataclass(frozen=True)
class Rules:
    """The fields of the configuration that replay and weight sync go by."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    publish_every: int = 1
    recompute: bool = True  # weight_sync.in_flight


@dataclass(frozen=True)
class Sync:
    """Seconds from a version's end of publishing to its arrival, and those for which every engine
    stands still to take it in.
    """

    transfer_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Cores that learner and engines share; on GPUs of their own they share nothing. `favour`: how
    much of a core a thread of the learner gets where one of an engine's gets 1. `queued`: by how
    much longer the learner takes than that where the cores are too few, for its thread stands in
    line on one of them; what it leaves is the engines'. `beside`: by how much an engine is slower
    than its share says while another of them works, since caches and memory are shared too.
    """

    cores: float = UNLIMITED
    beside: float = 1.0
    queued: float = 1.0
    favour: float = 1.0

    def paces(self, engines: float, learner: float) -> tuple[float, float]:
        """The share that engines and learner get of so many cores that each side wants."""
        if engines + learner <= self.cores or not (engines and learner):
            pace = min(1.0, self.cores / max(engines, learner, 1e-9))
            return pace, pace
        wanted = self.favour * learner
        share = min(learner, self.cores * wanted / (wanted + engines)) / self.queued
        left = min(engines, self.cores - share)
        return left / engines, min(share, self.cores - left) / learner


@dataclass(frozen=True)
class Scenario:
    """A run. `delivery_s`: what replay's one server spends on a trajectory."""

    workload: Workload
    engines: Engines
    learner: Learner
    rules: Rules
    sync: Sync = Sync()
    machine: Machine = Machine()
    delivery_s: float = 0.0

    @property
    def batch(self) -> int:
        """Rollouts of a step."""
        return self.rules.groups_per_step * self.rules.group_size

    @property
    def update_s(self) -> float:
        """Seconds of the learner's step on rollouts of mean length, alone."""
        learner = self.learner
        return learner.step_s + learner.token_s * self.batch * self.workload.tokens

"""Rollouts on a simulated engine: a prompt, turns of which each reads an observation, an answer.

Contexts grow like Search-R1's (prompts of 250 to 330 tokens, two to five completions of 200 tokens
on average, observations of 500). As in an actor, a rollout begins whenever fewer are in flight than
may be, a probe follows each update, and capacity is looked at once a second.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from actors.policies.base import PROBE
from actors.policies.capacity import Capacity
from scripts.bench.engine.simulator import Machine, SimulatedEngine

LOOK_S = 1.0
PROMPT_TOKENS = (250, 330)
COMPLETIONS = (2, 3, 4, 5, 5)
COMPLETION_TOKENS, LONGEST_COMPLETION = 200, 500
OBSERVATION_TOKENS, LONGEST_CONTEXT = 500, 4000
PROBE_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """One simulation: `in_flight` rollouts, or, where that is 0, as many as the cache holds."""

    by_priority: bool = True
    in_flight: int = 0
    update_every_s: float = 0.0  # 0: never
    keep: bool = False  # an update leaves caches and requests as they are
    search_s: float = 0.3
    warm_up_s: float = 20.0
    seconds: float = 60.0  # measured, after the warm-up
    seed: int = 0
    machine: Machine = field(default_factory=Machine)

    def on(self, kv_tokens: int) -> "Plan":
        """The same with another cache."""
        return replace(self, machine=replace(self.machine, kv_tokens=kv_tokens))

    def crowded(self) -> "Plan":
        """The same with two and a half rollouts in flight a seat, long enough to tell rates."""
        in_flight = 5 * self.machine.seats // 2
        return replace(self, in_flight=in_flight, warm_up_s=60.0, seconds=200.0)

    def first_capacity(self) -> Capacity:
        """The capacity to begin with."""
        machine, wanted = self.machine, self.in_flight
        if wanted:
            return Capacity(wanted, wanted, wanted)
        context = (sum(PROMPT_TOKENS) // 2 + machine.max_model_len) // 2
        return Capacity.of(machine.kv_tokens, context, machine.seats, least=1, most=0)


@dataclass(frozen=True)
class Figures:
    """A simulation's results, of the seconds behind its warm-up."""

    rollouts: int
    rollouts_per_s: float
    preemptions: int  # without those of updates
    probe_wait_s: float  # the longest
    capacity: float  # the mean over time


@dataclass
class _Rollout:
    number: int
    context: list[int]
    turns: int


class Simulation:
    """A plan under way."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._random = plan, random.Random(plan.seed)
        self._engine = SimulatedEngine(plan.machine, plan.by_priority)
        self._numbers = itertools.count()
        self._searching: list[tuple[float, int, _Rollout]] = []
        self._in_flight = self._ended = self._looked = 0
        self._capacity = plan.first_capacity()
        self._probe_waits = [0.0]
        self._capacities: list[int] = []  # one a look

    def run(self) -> Figures:
        """Simulate all of it."""
        plan, engine = self._plan, self._engine
        update_s, look_s = plan.update_every_s or float("inf"), LOOK_S
        ended = preemptions = -1
        while engine.now_s < plan.warm_up_s + plan.seconds:
            self._begin()
            engine.step()
            if engine.now_s >= update_s:
                update_s += plan.update_every_s
                self._update()
            if engine.now_s >= look_s:
                look_s += LOOK_S
                self._look()
            if ended < 0 and engine.now_s >= plan.warm_up_s:
                ended, preemptions = self._ended, engine.statistics.preemptions
                self._capacities.clear()
        return Figures(
            rollouts=self._ended - ended,
            rollouts_per_s=(self._ended - ended) / plan.seconds,
            preemptions=engine.statistics.preemptions - preemptions,
            probe_wait_s=max(self._probe_waits),
            capacity=statistics.fmean(self._capacities),
        )

    def _begin(self) -> None:
        while self._searching and self._searching[0][0] <= self._engine.now_s:
            self._ask(heapq.heappop(self._searching)[-1])
        while self._in_flight < self._capacity.now:
            number = next(self._numbers)
            own = 1000 + number  # no two rollouts share a prefix
            context = [own] * self._random.randint(*PROMPT_TOKENS)
            self._in_flight += 1
            self._ask(_Rollout(number, context, self._random.choice(COMPLETIONS)))

    def _ask(self, rollout: _Rollout) -> None:
        drawn = int(self._random.expovariate(1 / COMPLETION_TOKENS))
        tokens = min(LONGEST_COMPLETION, max(8, drawn))
        self._engine.add(rollout.context, tokens, rollout.number, partial(self._answered, rollout))

    def _answered(self, rollout: _Rollout, tokens: list[int]) -> None:
        rollout.context = tokens + [tokens[0]] * OBSERVATION_TOKENS
        rollout.turns -= 1
        if rollout.turns and len(rollout.context) < LONGEST_CONTEXT:
            found_s = self._engine.now_s + self._plan.search_s
            heapq.heappush(self._searching, (found_s, rollout.number, rollout))
        else:
            self._in_flight -= 1
            self._ended += 1

    def _update(self) -> None:
        if not self._plan.keep:
            self._engine.update()
        asked_s = self._engine.now_s
        self._engine.add(
            range(PROBE_TOKENS),
            1,
            PROBE,
            lambda _: self._probe_waits.append(self._engine.now_s - asked_s),
        )

    def _look(self) -> None:
        ended, self._looked = self._ended - self._looked, self._ended
        self._capacity.observe(self._engine.statistics.take_load(), ended, self._in_flight)
        self._capacities.append(self._capacity.now)


def simulate(plan: Plan) -> Figures:
    """Simulate a plan."""
    return Simulation(plan).run()


def fixed_beside_found(
    plan: Plan, fixed: Sequence[float], seconds: float = 250.0
) -> dict[str, Any]:
    """The capacity that is found for a plan, and rates of `fixed` ones, multiples of its first.

    `best_fixed`: the one of the highest rate.
    """
    first = plan.first_capacity().now
    numbers = sorted({max(1, round(first * each)) for each in fixed})
    planned = (replace(plan, in_flight=n, warm_up_s=60.0, seconds=seconds) for n in numbers)
    rates = {each.in_flight: simulate(each).rollouts_per_s for each in planned}
    best = max(rates, key=rates.__getitem__)
    found = simulate(replace(plan, warm_up_s=200.0, seconds=2 * seconds))
    return {
        "capacity": found.capacity,
        "best_fixed": best,
        "rate_over_best": found.rollouts_per_s / rates[best],
        "rates": rates,
        "rollouts": found.rollouts,
        "preemptions": found.preemptions,
    }

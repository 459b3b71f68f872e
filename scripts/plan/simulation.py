"""The discrete-event simulation of a run: engines, replay's rules, the learner, weight sync.

There are two clocks. Searches, deliveries and transfers take time. Generation takes *work*: seconds
of engines that have all the cores they want. Where the machine has too few, work goes by more
slowly for all of them; with GPUs of their own both clocks are one. So an engine's next event needs
no change when the learner begins: only the pace of its clock does. The learner has a pace of its
own, since its threads come before the engines'.
"""

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import cycle, islice
from typing import Any

from scripts.plan.engine import Engine, Engines, Group, Rollout
from scripts.plan.ledger import Ledger
from scripts.plan.outcome import Meter, Outcome
from scripts.plan.scenario import UNLIMITED, Learner, Rules, Scenario, Sync

EVERYTHING = 1 << 40  # of staleness: admission never holds anybody up
# Of an event on the clock of time; on that of work there are ends of turns alone.
_FOUND, _DELIVERED, _ARRIVED, _LEARNT = range(4)
LATENCIES = 20_011  # drawn once each, then again in turn


class _Task:
    """What the learner works at. It ends at `end_s`; another pace changes that, and `stamp`."""

    def __init__(self) -> None:
        self.then: Callable[[], None] | None = None
        self.end_s, self.stamp, self._pace = 0.0, 0, 1.0

    def begin(self, now_s: float, seconds: float, then: Callable[[], None]) -> None:
        self.then, self.stamp = then, self.stamp + 1
        self.end_s = now_s + seconds / self._pace

    def change(self, now_s: float, pace: float) -> bool:
        """Go on at another pace; True where something ends at another time for it."""
        before, self._pace = self._pace, pace
        if self.then is None or pace == before:
            return False
        self.stamp += 1
        self.end_s = now_s + (self.end_s - now_s) * before / pace
        return True


class Simulation:
    """One run of a scenario, for `steps` steps behind `warm_up`."""

    def __init__(self, scenario: Scenario, *, steps: int, warm_up: int, seed: int = 0) -> None:
        rules = scenario.rules
        self._of, self._last, self._warm_up = scenario, steps + warm_up, warm_up
        self._chance = random.Random(f"plan {seed}")
        self._late, self._beside_s = self._lates(), scenario.workload.beside_s
        self._ledger, self._act = Ledger(rules), Engines(scenario)
        self._engines = [Engine(scenario.engines.capacity) for _ in range(scenario.engines.count)]
        self._meter = Meter(scenario)
        self._now = self._work = 0.0
        self._pace = 1.0  # seconds of engines' work in a second
        self._task = _Task()
        self._timers: list[tuple[float, int, int, Any]] = []
        self._works: list[tuple[float, int, Engine, int]] = []
        self._numbers = 0
        full = scenario.engines.capacity
        self._free = [(-full, n, engine) for n, engine in enumerate(self._engines)]
        self._step = self._done = self._served = self._sending = self._newest = 0
        self._training = False
        self._asked_s = self._replay_free_s = self._oldest_s = self._begun_s = 0.0

    def run(self) -> Outcome:
        """Simulate all of it."""
        self._lease()
        on_time = (self._found, self._delivered, self._arrived, self._learnt)
        timers, works = self._timers, self._works
        while self._done < self._last:
            timer_s = timers[0][0] if timers else UNLIMITED
            work_s = self._now + (works[0][0] - self._work) / self._pace if works else UNLIMITED
            if work_s < timer_s:
                self._now = work_s
                self._work, _, engine, stamp = heappop(works)
                if stamp == engine.stamp:
                    self._turns_end(engine)
            elif timers:
                self._work += (timer_s - self._now) * self._pace
                self._now, _, kind, what = heappop(timers)
                on_time[kind](what)
            else:
                raise RuntimeError("nothing is left to happen: the scenario cannot go on")
        return self._meter.outcome(self._now, self._anew_s())

    def _at(self, time_s: float, kind: int, what: Any) -> None:
        self._numbers += 1
        heappush(self._timers, (time_s, self._numbers, kind, what))

    # ---- engines

    def _look(self, engine: Engine) -> None:
        """Expect the engine's next end, after anything about it has changed."""
        engine.stamp += 1
        if engine.running:
            self._numbers += 1
            end = self._act.next_end(engine)
            heappush(self._works, (end, self._numbers, engine, engine.stamp))

    def _turns_end(self, engine: Engine) -> None:
        act, running = self._act, engine.running
        act.advance(engine, self._work)
        while running and act.is_over(engine):
            self._go_on(engine, act.end(engine))
        self._look(engine)
        if not running:
            self._engines_busy(-1)

    def _go_on(self, engine: Engine, rollout: Rollout) -> None:
        """After a turn: deliver, search, or generate again."""
        turns = rollout.shape.turns
        turn = turns[rollout.turn - 1]
        self._meter.sampled(turn.action)
        if rollout.turn == len(turns):
            queued_s = self._replay_free_s - self._now
            self._replay_free_s += self._of.delivery_s - min(0.0, queued_s)
            self._meter.acknowledged(self._replay_free_s - self._now)
            self._at(self._replay_free_s, _DELIVERED, rollout)
        elif turn.searches:
            self._meter.searched(self._now)
            found_s = self._late_s(rollout.group, turn.query) + self._beside_s
            self._at(self._now + found_s, _FOUND, rollout)
        else:
            self._act.begin(engine, rollout)

    def _found(self, rollout: Rollout) -> None:
        engine = rollout.engine
        idle = not engine.running
        self._act.advance(engine, self._work)
        self._act.begin(engine, rollout)
        self._look(engine)
        if idle:
            self._engines_busy(1)

    def _engines_busy(self, by: int) -> None:
        self._meter.engines_busy(self._now, by)
        self._set_pace()

    def _set_pace(self) -> None:
        """Share the cores out among all that work."""
        machine, busy = self._of.machine, self._meter.busy
        if machine.cores == UNLIMITED:
            return
        engines, learner = busy * self._of.engines.cores, self._training * self._of.learner.cores
        self._pace, pace = machine.paces(engines, learner)
        if busy + self._training > 1:
            self._pace /= machine.beside
        if self._task.change(self._now, pace):
            self._expect()

    # ---- replay

    def _lease(self) -> None:
        """Give groups to the actors that hold the fewest rollouts, as far as admission goes."""
        size, free = self._of.rules.group_size, self._free
        while free and self._ledger.may_open(self._served):
            known, number, engine = free[0]
            if engine.free != -known or engine.free < size:
                heappop(free)
                continue
            heappop(free)
            engine.free -= size
            if engine.free >= size:
                heappush(free, (-engine.free, number, engine))
            self._begin(self._ledger.open(self._served, size), engine, size)

    def _begin(self, group: Group, engine: Engine, size: int) -> None:
        idle = not engine.running
        self._act.advance(engine, self._work)
        for shape in self._of.workload.group(size, self._chance):
            self._act.begin(engine, Rollout(group, engine, shape, self._now))
        self._look(engine)
        self._meter.begun(self._now, size)
        if idle:
            self._engines_busy(1)

    def _delivered(self, rollout: Rollout) -> None:
        group, engine = rollout.group, rollout.engine
        engine.free += 1
        if engine.free >= self._of.rules.group_size:
            self._numbers += 1
            heappush(self._free, (-engine.free, self._numbers, engine))
        self._meter.delivered(self._now, self._now - rollout.begun_s)
        group.rollouts.append(rollout)
        group.left -= 1
        if not group.left:
            group.closed_at = self._step
            if self._of.workload.no_signal and self._chance.random() < self._of.workload.no_signal:
                self._ledger.drop(group)
            else:
                self._ledger.close(group)
                self._sample()
        self._lease()

    # ---- the learner

    def _sample(self) -> None:
        """Take a batch if the learner waits and there is one."""
        if self._training:
            return
        batch = self._ledger.batch(self._step)
        if not batch:
            if batch is not None and not self._oldest_s:
                self._oldest_s = self._now
            return
        oldest_s = self._now - self._oldest_s if self._oldest_s else 0.0
        self._meter.waited(self._now - self._asked_s, oldest_s)
        self._oldest_s, self._training = 0.0, True
        rollouts = [rollout for group in batch for rollout in group.rollouts]
        tokens = sum(rollout.shape.tokens for rollout in rollouts)
        self._meter.batch(self._step, batch)
        for group in batch:
            group.rollouts.clear()  # they know their group: nothing is left to find circles of
        self._set_pace()
        learner = self._of.learner
        self._begun_s = self._now
        self._learn(learner.step_s + learner.token_s * tokens, self._trained)

    def _learn(self, seconds: float, then: Callable[[], None]) -> None:
        """Have the learner work for so long, then do this."""
        self._task.begin(self._now, seconds, then)
        self._expect()

    def _expect(self) -> None:
        """Expect the end of the learner's task, after its pace has changed."""
        self._at(self._task.end_s, _LEARNT, self._task.stamp)

    def _learnt(self, stamp: int) -> None:
        if stamp == self._task.stamp and (then := self._task.then):
            self._task.then = None
            then()

    def _trained(self) -> None:
        self._step += 1
        self._meter.updated(self._now - self._begun_s)
        due = self._step % self._of.rules.publish_every == 0
        self._learn(self._of.learner.publish_s if due else 0.0, self._published)

    def _published(self) -> None:
        """Hand the version to whoever sends it, and ask for the next batch."""
        self._training, self._done = False, self._step
        if self._step % self._of.rules.publish_every == 0:
            self._newest = self._step
            self._send()
        self._meter.step(self._now)
        if self._step == self._warm_up:
            self._meter.begin(self._now, self._anew_s())
        self._asked_s = self._now
        self._set_pace()
        self._sample()

    # ---- weight sync

    def _send(self) -> None:
        """Send the newest version, unless one is under way: the latest wins."""
        if not self._sending and self._newest > self._served:
            self._sending = self._newest
            self._at(self._now + self._of.sync.transfer_s, _ARRIVED, self._sending)

    def _arrived(self, version: int) -> None:
        self._act.update(self._work, version)
        self._served, self._sending = version, 0
        self._meter.paused(self._of.sync.pause_s)
        self._send()
        self._lease()

    def _late_s(self, group: Group, query: int) -> float:
        """Seconds of a search; of siblings that ask the same, the same."""
        if not query:
            return next(self._late)
        if query not in group.answers_s:
            group.answers_s[query] = next(self._late)
        return group.answers_s[query]

    def _lates(self) -> Iterator[float]:
        drawn = self._of.workload.latency.draws(self._chance)
        return cycle(islice(drawn, LATENCIES))

    def _anew_s(self) -> float:
        return sum(engine.anew_s for engine in self._engines)


def simulate(scenario: Scenario, *, steps: int, warm_up: int, seed: int = 0) -> Outcome:
    """Simulate a scenario."""
    simulation, collects = (
        Simulation(scenario, steps=steps, warm_up=warm_up, seed=seed),
        gc.isenabled(),
    )
    gc.disable()  # nothing circular is left behind, and looking for it takes a sixth of the time
    try:
        return simulation.run()
    finally:
        if collects:
            gc.enable()


def unheld(scenario: Scenario, *, steps: int, seed: int = 0) -> Outcome:
    """What the engines do where nothing holds them up: no admission, no learner, no new weights.
    The cores are all theirs.
    """
    rules = Rules(scenario.rules.groups_per_step, scenario.rules.group_size, EVERYTHING, EVERYTHING)
    free = replace(scenario, rules=rules, learner=Learner(), sync=Sync(), delivery_s=0.0)
    return simulate(free, steps=steps, warm_up=max(1, steps // 4), seed=seed)

"""Slow questions are trained as often as they are asked: nothing is lost for taking long.

The real ledger under simulated actors, learner and clock. Every fourth question is of a family
whose rollouts always take ten times as long, as multi-hop questions do. A group that was opened is
trained or dropped, but for at most (max_staleness + 1)·G that are unfinished at the end: after
2,000 steps of 4 that is 0.6 % of the slow family, were it all of it, so 2 % is a bound that a bias
breaks and the end of the run does not.
"""

import heapq
import random
from collections import Counter
from typing import Any

import pytest

from replay.log.records import GroupOpened
from replay.protocol import Batch, Committed, Lease, Ready

STEPS, GROUPS, QUESTIONS, SLOW_EVERY, SLOWDOWN = 2000, 4, 100, 4, 10.0
LEARN_S, APPLY_S, COMMIT_EVERY = 0.5, 1.0, 20


def is_slow(question_id: str) -> bool:
    """Return True if a question is of the slow family."""
    return int(question_id.partition("-")[2]) % SLOW_EVERY == 0


class Simulation:
    """Three actors of eight rollouts each, which apply versions late, and a learner."""

    def __init__(self, scene: Any, seed: int) -> None:
        self.scene, self.random = scene, random.Random(seed)
        self.step, self.learning, self.staleness = 0, False, 0
        self.versions = dict.fromkeys(("a", "b", "c"), 0)
        self.events: list[tuple[float, int, str, Any]] = []
        self.number = 0
        self.trained: list[int] = []  # group ids
        scene.learner()
        for name in self.versions:
            scene.actor(name, 8)
        self.after(1.0, "tick", None)

    def after(self, seconds: float, kind: str, what: Any) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.scene.now + seconds, self.number, kind, what))

    def run(self, steps: int) -> None:
        self.begin_rollouts()
        while self.step < steps:
            self.scene.now, _, kind, what = heapq.heappop(self.events)
            getattr(self, kind)(what)
            self.begin_rollouts()
            self.ask_for_a_batch()

    def begin_rollouts(self) -> None:
        for name, version in self.versions.items():
            for lease in self.scene.leased.pop(name, []):
                seconds = self.random.expovariate(1.0)
                slow = SLOWDOWN if is_slow(lease.question.id) else 1.0
                self.after(seconds * slow, "delivered", (name, lease, version))

    def ask_for_a_batch(self) -> None:
        if self.learning:
            return
        batch = self.scene.sample(self.step)
        if isinstance(batch, Batch):
            self.learning = True
            self.trained += batch.group_ids
            self.staleness = max(self.staleness, self.step - min(batch.versions))
            self.after(LEARN_S, "learnt", None)

    def delivered(self, what: tuple[str, Lease, int]) -> None:
        name, lease, version = what
        self.scene.deliver(name, lease, version=version)

    def learnt(self, _: None) -> None:
        self.step, self.learning = self.step + 1, False
        for name in self.versions:
            self.after(self.random.random() * APPLY_S, "applied", (name, self.step))
        if self.step % COMMIT_EVERY == 0:
            self.scene.send("learner", Committed(1, self.step))

    def applied(self, what: tuple[str, int]) -> None:
        name, version = what
        self.versions[name] = max(version, self.versions[name])
        self.scene.send(name, Ready(name, 8, 1, self.versions[name]))

    def tick(self, _: None) -> None:
        self.scene.tick(0.0)
        self.after(1.0, "tick", None)

    def share_trained(self) -> dict[bool, float]:
        """Of the groups opened of each family (True: slow), how many were trained."""
        opened = {f.group_id: is_slow(f.question.id) for f in self.scene.log if _is_train(f)}
        asked, trained = Counter(opened.values()), Counter(opened[i] for i in self.trained)
        assert len(self.trained) == len(set(self.trained)), "trained twice"
        return {family: trained[family] / asked[family] for family in asked}


def _is_train(fact: object) -> bool:
    return isinstance(fact, GroupOpened) and fact.kind == "train"


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [2, 0])
def test_a_family_ten_times_slower_is_trained_as_often_as_it_is_asked(
    tools: Any, max_staleness: int
) -> None:
    scene = tools.Scene(questions=QUESTIONS, groups_per_step=GROUPS, max_staleness=max_staleness)
    simulation = Simulation(scene, seed=max_staleness)
    simulation.run(STEPS)
    shares = simulation.share_trained()
    assert len(simulation.trained) == STEPS * GROUPS and not scene.dropped
    assert 0.98 <= shares[True] <= 1.0 and abs(shares[True] / shares[False] - 1.0) <= 0.02
    assert simulation.staleness <= max_staleness


def test_a_deadline_that_cuts_the_slow_off_would_be_noticed(tools: Any) -> None:
    scene = tools.Scene(
        questions=QUESTIONS, groups_per_step=GROUPS, max_staleness=2, group_deadline_s=20.0,
        max_question_failures=1000,
    )  # fmt: skip
    simulation = Simulation(scene, seed=0)
    simulation.run(STEPS // 10)
    shares = simulation.share_trained()
    assert shares[True] < 0.9 < 0.98 < shares[False] + 0.02
    assert scene.dropped["group_deadline"] > 0

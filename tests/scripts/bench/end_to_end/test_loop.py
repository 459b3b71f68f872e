"""The synchronous schedules: who waits for whom, and which engine a group is asked of."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.environments.base import Retriever
from actors.policies.base import Completion
from replay.protocol import Batch, Lease
from replay.trajectory import Question, Sampling, Trajectory
from retrieval_server.protocol import Passage
from scripts.bench.end_to_end import loop
from scripts.bench.end_to_end.loop import Course, EnginesInTurn, Freely, InStep
from scripts.bench.end_to_end.record import Job, Kind, Record
from scripts.train_sync import Rollouts

GROUPS, SIBLINGS, TURNS = 3, 2, 2
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 0, "max_tokens": 4, "stops": ()}


class Noted:
    """A policy and a retriever that note how many are in them, and what came before what."""

    def __init__(self, name: str = "") -> None:
        self.name, self.log, self.inside, self.asked = name, list[str](), {"c": 0, "s": 0}, 0

    async def complete(self, tokens: Sequence[int], **_: Any) -> Completion:
        self.asked += 1
        await self._be("c", 0.001 * (tokens[0] % 5))
        ids = np.array([1], np.int32)
        return Completion(ids, ids.astype(np.float32), ids, "stop")

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        await self._be("s", 0.001 * (len(queries[0]) % 7))
        return [[]]

    async def _be(self, kind: str, seconds: float) -> None:
        self.inside[kind] += 1
        self.log.append(f"{kind}{self.inside['c']}{self.inside['s']}")
        await asyncio.sleep(seconds)
        self.inside[kind] -= 1


class Playing(Rollouts):
    """Rollouts of some turns each, beside nothing of a run; siblings end at different turns."""

    def __init__(self, policy: Any, retriever: Retriever) -> None:
        self.policy, self.retriever, self.opened = policy, retriever, 1

    async def one(self, lease: Lease) -> Trajectory | None:
        for turn in range(TURNS + lease.sibling):
            await self.policy.complete([lease.group_id + turn], **SAMPLED)
            await self.retriever.retrieve(["x" * (lease.group_id + turn)], 1)
        return None


class PlayingInStep(InStep, Playing):
    """The same in step."""


class PlayingFreely(Freely, Playing):
    """The same, each for itself."""


async def play(rollouts: Rollouts) -> None:
    """A batch's groups, begun as `Rollouts.batch` begins them."""

    async def group(group_id: int) -> None:
        if isinstance(rollouts, InStep):
            rollouts.step.join(SIBLINGS)
        question = Question("q", "?", ("a",))
        leases = (Lease(group_id, n, "train", question, Sampling()) for n in range(SIBLINGS))
        await asyncio.gather(*map(rollouts.one, leases))

    await asyncio.gather(*map(group, range(1, GROUPS + 1)))


def in_step(policy: Any, retriever: Retriever) -> InStep:
    """Rollouts in step on this engine, without the files of a run."""
    from scripts.bench.overlap.loops import LockStep

    rollouts = PlayingInStep.__new__(PlayingInStep)
    rollouts.step = LockStep(policy, retriever, 0)
    Playing.__init__(rollouts, rollouts.step, rollouts.step)
    return rollouts


@pytest.mark.timeout(20)
async def test_in_step_all_generate_then_all_search() -> None:
    noted = Noted()
    await play(in_step(noted, noted))
    kinds = "".join(each[0] for each in noted.log)
    everybody, later = GROUPS * SIBLINGS, GROUPS
    turns = [everybody] * TURNS + [later]  # one sibling of each group plays a turn more
    assert kinds == "".join("c" * n + "s" * n for n in turns)
    assert all("0" in each for each in noted.log)  # nobody searched while another generated


@pytest.mark.timeout(20)
async def test_in_step_a_second_batch_is_in_step_as_well() -> None:
    noted = Noted()
    rollouts = in_step(noted, noted)
    await play(rollouts)
    once = len(noted.log)
    await play(rollouts)
    assert len(noted.log) == 2 * once and all("0" in each for each in noted.log)


@pytest.mark.timeout(20)
async def test_freely_one_searches_while_another_generates() -> None:
    noted = Noted()
    rollouts = PlayingFreely.__new__(PlayingFreely)
    Playing.__init__(rollouts, noted, noted)
    await play(rollouts)
    assert any("0" not in each for each in noted.log)


@pytest.mark.timeout(20)
async def test_the_groups_go_to_the_engines_in_turn() -> None:
    first, second = Noted("first"), Noted("second")
    rollouts = PlayingFreely.__new__(PlayingFreely)
    Playing.__init__(rollouts, EnginesInTurn((first, second)), Noted())
    await play(rollouts)
    each = SIBLINGS * TURNS + 1  # turns of a group
    assert (first.asked, second.asked) == (each, 2 * each)  # groups 2; 1 and 3


@pytest.mark.timeout(20)
async def test_in_step_the_groups_go_to_the_engines_in_turn_as_well() -> None:
    first, second, searched = Noted("first"), Noted("second"), Noted()
    await play(in_step(EnginesInTurn((first, second)), searched))
    each = SIBLINGS * TURNS + 1
    assert (first.asked, second.asked) == (each, 2 * each)


class Beside:
    """Batches, updates and pushes that take a moment; `log`: their beginnings and ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.tokens, self.evaluated = list[str](), 0, list[int]()
        monkeypatch.setattr(loop, "learn", self.learn)
        monkeypatch.setattr(loop, "_push_all", self.push)

    async def batch(self, step: int) -> Batch:
        self.log.append(f"roll {step}")
        await asyncio.sleep(0.05)
        self.tokens += 10
        self.log.append(f"rolled {step}")
        return Batch(step + 1, (), (), (), {}, {}, ())

    def learn(self, trainer: object, batch: Batch) -> None:
        self.log.append(f"learn {batch.step}")
        time.sleep(0.1)
        self.log.append(f"learnt {batch.step}")

    async def push(self, trainer: object, policies: object, version: int, folder: Path) -> None:
        self.log.append(f"push {version}")

    async def evaluate(self) -> dict[str, float]:
        self.tokens += 1000
        return {"em": 0.5}

    async def run(self, kind: Kind, *, learns: bool = False) -> Record:
        config = SimpleNamespace(learner=SimpleNamespace(eval_every=2))
        job = Job(kind, "", (), 1, 3, learns, ("", 0))
        trainer: Any = SimpleNamespace(config=config)
        itself: Any = self
        return await Course(job, trainer, itself, [], itself, Path()).run()


@pytest.mark.timeout(20)
async def test_in_turn_nothing_is_beside_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(monkeypatch)
    found = await beside.run("sync")
    of_steps = ((f"push {n}", f"roll {n}", f"rolled {n}") for n in range(3))
    learnt = ((f"learn {n}", f"learnt {n}") for n in range(1, 4))
    both = zip(of_steps, learnt, strict=True)
    assert beside.log == [w for each in both for part in each for w in part] + ["push 3"]
    assert [step.staleness for step in found.steps] == [0.0, 0.0, 0.0]


@pytest.mark.timeout(20)
async def test_one_step_off_the_next_batch_is_beside_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = Beside(monkeypatch)
    found = await beside.run("ahead")
    where = {word: place for place, word in enumerate(beside.log)}
    for n in (1, 2):
        assert where[f"roll {n}"] < where[f"learnt {n}"]  # by the weights before that update
        assert max(where[f"rolled {n}"], where[f"learnt {n}"]) < where[f"push {n}"]
        assert where[f"push {n}"] < min(where[f"roll {n + 1}"], where[f"learn {n + 1}"])
    assert beside.log[-1] == "push 3" and "roll 3" in beside.log  # beside the last update, too
    assert [step.staleness_max for step in found.steps] == [0.0, 1.0, 1.0]
    assert sum(step.sampled for step in found.steps) == beside.tokens


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["sync", "ahead"])
async def test_evaluations_are_no_tokens_of_a_step_and_have_the_engines_alone(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Beside(monkeypatch)
    found = await beside.run(kind, learns=True)
    assert [each.step for each in found.evaluations] == [0, 2, 3]
    assert all(step.sampled <= 20 for step in found.steps)

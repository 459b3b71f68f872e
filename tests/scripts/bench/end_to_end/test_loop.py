"""The synchronous schedules: who waits for whom, and which engine a group is asked of."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.environments.base import Retriever
from actors.policies.base import Completion
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, Trajectory
from retrieval_server.protocol import Passage
from scripts.bench.end_to_end.loop import EnginesInTurn, Freely, InStep
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

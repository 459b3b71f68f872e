"""`Environment.close`: awaited once, however the rollout ends."""

import asyncio
import json
import logging
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from actors.environments import registry
from actors.environments.base import NOTHING, Outcome
from actors.errors import EnvironmentFailed
from configs.environment import EnvironmentConfig
from configs.rewards import RewardsConfig, RewardWeights
from replay.trajectory import Question, StopReason

HERE = "tests.actors.environments.test_closing"
ANSWER = "<answer> kelu </answer>"
events: list[str] = []


class Opened:
    """Does what its question says, and notes what happens to it."""

    stops = ("</answer>",)

    def __init__(self, lease: Any, *, retriever: Any, prompter: Any, config: Any) -> None:
        self.told = lease.question.fields
        self.prompt = NOTHING if self.told.get("promptless") else prompter.question(lease.question)
        self.turns = 0
        events.append("made")

    def budget(self, context_tokens: int) -> int:
        return 16

    async def step(self, action_tokens: Any, context_tokens: int) -> Outcome:
        if self.told.get("waits"):
            events.append("waits")
            await asyncio.Event().wait()
        if self.told.get("raises"):
            raise KeyError("turn")
        self.turns += 1
        stop = StopReason.ANSWERED if self.turns == 2 else None
        info = self.told.get("info", {"turn": self.turns})
        reward = self.told.get("reward", 0.25)
        return Outcome(NOTHING, stop=stop, answer=stop and "kelu", reward=reward, info=info)

    async def close(self) -> None:
        events.append("closing")
        await asyncio.sleep(self.told.get("closes_in", 0.0))
        if self.told.get("close_raises"):
            raise OSError("the container is gone")
        events.append("closed")


class ClosesAtOnce(Opened):
    """Its `close` is a plain function."""

    def close(self) -> None:  # type: ignore[override]
        events.append("closed")


@pytest.fixture(autouse=True)
def forgotten() -> None:
    events.clear()


def played(stage: Any, lease_for: Any, name: str = "Opened", **told: Any) -> Any:
    extra = json.dumps(told)
    lease = lease_for(question=Question("q", "who ?", ("kelu",), extra=extra))
    limit = told.get("limit", 10.0)
    settings = EnvironmentConfig(name=f"{HERE}:{name}", close_deadline_s=limit)
    return stage.perform("hm", ANSWER, lease=lease, environment=settings)


@pytest.mark.parametrize(
    ("name", "last"), [("Opened", ["closing", "closed"]), ("ClosesAtOnce", ["closed"])]
)
def test_it_is_closed_once_after_the_last_turn(
    stage: Any, lease_for: Any, name: str, last: Any
) -> None:
    assert asyncio.run(played(stage, lease_for, name)).answer == "kelu"
    assert events == ["made", *last]


@pytest.mark.parametrize("fault", ["raises", "promptless"])
def test_it_is_closed_where_its_rollout_fails(stage: Any, lease_for: Any, fault: str) -> None:
    with pytest.raises(EnvironmentFailed):
        asyncio.run(played(stage, lease_for, **{fault: True}))
    assert events == ["made", "closing", "closed"]


async def test_it_is_closed_where_its_rollout_is_cancelled_even_twice(
    stage: Any, lease_for: Any
) -> None:
    rollout = asyncio.create_task(played(stage, lease_for, waits=True, closes_in=0.05))
    for awaited in ("waits", "closing"):
        while awaited not in events:
            await asyncio.sleep(0)
        rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert events == ["made", "waits", "closing", "closed"]


async def test_it_is_closed_at_its_rollouts_deadline(stage: Any, lease_for: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await played(stage, lease_for, waits=True)
    assert events[-1] == "closed"


def test_a_close_that_hangs_ends_at_its_deadline_and_the_rollout_stands(
    stage: Any, lease_for: Any, caplog: pytest.LogCaptureFixture
) -> None:
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        found = asyncio.run(played(stage, lease_for, closes_in=60.0, limit=0.05))
    assert found.answer == "kelu" and time.monotonic() - begun < 10.0
    assert "close took over 0.05 s (environment.close_deadline_s)" in caplog.text


def test_a_close_that_raises_is_told_and_the_rollout_stands(
    stage: Any, lease_for: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(played(stage, lease_for, close_raises=True)).answer == "kelu"
    assert "OSError: the container is gone" in caplog.text


def test_what_an_environment_gives_and_tells_is_on_record(stage: Any, lease_for: Any) -> None:
    found = asyncio.run(played(stage, lease_for))
    assert [turn.reward for turn in found.turns] == [0.25, 0.25]
    assert [turn.info for turn in found.turns] == ['{"turn":1}', '{"turn":2}']


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int64, Fraction])
def test_a_reward_may_be_any_kind_of_number(kind: Any) -> None:
    reward = registry._checked(Outcome(NOTHING, reward=kind(2))).reward
    assert type(reward) is float and reward == 2.0


def test_what_an_environment_gives_is_a_part_of_the_reward(stage: Any, lease_for: Any) -> None:
    lease = lease_for(question=Question("q", "who ?", (), extra='{"reward": 0.5}'))
    found = stage.play(
        "hm",
        ANSWER,
        lease=lease,
        environment=EnvironmentConfig(name=f"{HERE}:Opened"),
        rewards=RewardsConfig(weights=RewardWeights(em=0.0, environment=2.0)),
    )
    assert found.reward == 2.0 and found.reward_parts == {"environment": 1.0}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"reward": "much"}, "ValueError: reward = 'much' is no finite number"),
        ({"reward": None}, "reward = None is no finite number"),
        ({"reward": 10**400}, "ValueError: reward = 10+ is no finite number"),
        ({"info": ["x"]}, r"TypeError: info = \['x'\] is no mapping"),
    ],
)
def test_what_no_record_could_hold_fails_the_rollout_by_name(
    stage: Any, lease_for: Any, told: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=words):
        asyncio.run(played(stage, lease_for, **told))
    assert events[-1] == "closed"

"""One door for all rollouts: turns are played here, programs behind a gateway."""

import sys
from typing import Any

import msgspec

from actors.gateway.rolling import rolling
from actors.prompt import Prompter
from actors.rewards.scorer import Rewards
from configs.environment import EnvironmentConfig, ProgramConfig
from configs.schema import Config
from tests.actors.conftest import FixedRetriever, Scripted, make_config, make_lease

TEXTS = ("<search> mayor of bore </search>", "<answer> kelu </answer>")


def opened(config: Config, tokenizer: Any) -> Any:
    return rolling(
        config,
        policy=Scripted(tokenizer, TEXTS),
        prompter=Prompter(tokenizer, config.questions, config.actors),
        rewards=Rewards(config.rewards),
        actor_id="actor-0",
    )


async def test_turns_are_played_and_audited(word_tokenizer: Any) -> None:
    async with opened(make_config(), word_tokenizer) as rollouts:
        trajectory = await rollouts.roll(make_lease(), FixedRetriever())
        assert (trajectory.answer, trajectory.actor_id) == ("kelu", "actor-0")
        assert rollouts.gauges() == {"actor/token_mismatch": 0.0}


async def test_a_program_s_gateway_is_there_as_long_as_the_door(word_tokenizer: Any) -> None:
    program = ProgramConfig(command=(sys.executable, "-c", "pass"))
    settings = EnvironmentConfig(name="program", program=program)
    config = msgspec.structs.replace(make_config(), environment=settings)
    async with opened(config, word_tokenizer) as rollouts:
        gauges = rollouts.gauges()
    assert gauges["actor/gateway_sessions"] == gauges["actor/programs_running_count"] == 0.0
    assert gauges["actor/token_mismatch"] == gauges["actor/calls_per_rollout"] == 0.0

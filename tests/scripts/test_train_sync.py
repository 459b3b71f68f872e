"""A run in one process: which groups count."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.policies.base import Completion, Stops
from actors.prompt import Prompter
from actors.rewards.custom import UserReward
from actors.rewards.scorer import Rewards
from actors.rewards.transcript import Transcript
from configs.rewards import RewardsConfig, RewardWeights
from configs.schema import ActorsConfig, Config, ModelConfig, QuestionsConfig, ReplayConfig
from retrieval_server.protocol import Passage
from scripts.train_sync import Rollouts


class Silent:
    """A policy that says one word, and a retriever that nobody asks."""

    async def complete(
        self, tokens: Sequence[int], *, temperature: float, seed: int, max_tokens: int, stops: Stops
    ) -> Completion:
        word = np.ones(1, np.int32)
        return Completion(word, np.zeros(1, np.float32), word, "length")

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        raise AssertionError("nobody searches")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "who?", "answers": ["me"]}\n')
    return Config(
        model=ModelConfig(max_model_len=64),
        questions=QuestionsConfig(train=str(path), eval=str(path), prompt="{question}"),
        actors=ActorsConfig(max_turns=0),
        replay=ReplayConfig(groups_per_step=1, group_size=2, drop_no_signal=True),
    )


def rewarding(values: Iterator[float | None]) -> Rewards:
    """One value for each train rollout; None is no number."""

    def following(transcript: Transcript) -> float | None:
        return next(values)

    asked = RewardsConfig(weights=RewardWeights(em=0.0, custom=1.0), custom="mine:reward")
    return Rewards(asked, custom=UserReward("mine:reward", following, 60.0))


def test_an_unscorable_sibling_is_no_signal(config: Config, word_tokenizer: Any) -> None:
    rewards = rewarding(iter((None, 0.0, 1.0, 1.0, 0.0, 1.0)))
    prompter, silent = Prompter(word_tokenizer, config.questions, config.actors), Silent()
    parts = {"policy": silent, "retriever": silent, "prompter": prompter, "rewards": rewards}
    batch = asyncio.run(Rollouts(config, **parts).batch(0))
    assert batch.group_ids == (3,)


def test_an_evaluation_is_exact_match(config: Config, word_tokenizer: Any) -> None:
    prompter, silent = Prompter(word_tokenizer, config.questions, config.actors), Silent()
    parts = {"policy": silent, "retriever": silent, "prompter": prompter}
    rollouts = Rollouts(config, **parts, rewards=rewarding(iter(())))
    assert asyncio.run(rollouts.evaluate()) == {"em": 0.0, "sampled_em": 0.0, "em_0_hops": 0.0}

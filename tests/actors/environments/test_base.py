"""Budgets of the environment, and tags that are several tokens."""

import asyncio
from typing import Any

import pytest

from actors.environments.base import Environment
from actors.environments.registry import make
from retrieval_server.protocol import Passage

TEMPLATES = {
    "observation_template": "\n\n<information>{passages}</information>\n\n",
    "max_action_tokens": 40,
}


def made(stage: Any, config: Any, lease: Any) -> Environment:
    """The environment that this configuration names."""
    prompter = stage.prompter(config)
    return asyncio.run(make(lease, retriever=stage.retriever, prompter=prompter, config=config))


@pytest.mark.parametrize(
    ("context", "budget"), [(0, 16), (84, 16), (85, 15), (92, 8), (93, 0), (100, 0), (130, 0)]
)
def test_a_completion_shrinks_to_the_room_left_but_not_below_8(
    stage: Any, config_for: Any, lease_for: Any, context: int, budget: int
) -> None:
    config = config_for(max_model_len=100)
    environment = made(stage, config, lease_for())
    assert environment.budget(context) == budget


def test_short_completions_need_only_their_own_room(
    stage: Any, config_for: Any, lease_for: Any
) -> None:
    config = config_for(max_model_len=100, max_action_tokens=4)
    environment = made(stage, config, lease_for())
    assert [environment.budget(96), environment.budget(97)] == [4, 0]


def test_tags_of_several_tokens_are_read_and_accounted_for(stage: Any, bpe_tokenizer: Any) -> None:
    stage.tokenizer = bpe_tokenizer
    texts = "I must <search> mayor of bore </search>", "<answer> kelu </answer>"
    trajectory = stage.play(*texts, **TEMPLATES)
    assert trajectory.reward == 1.0 and stage.retriever.queries == ["mayor of bore"]
    encoded = [bpe_tokenizer.encode(text) for text in texts]
    assert [turn.action_tokens.tolist() for turn in trajectory.turns] == encoded
    assert trajectory.action_count == sum(map(len, encoded))
    assert stage.policy.prompts[1] == (
        trajectory.prompt_tokens.tolist()
        + encoded[0]
        + trajectory.turns[0].observation_tokens.tolist()
    )


def test_a_tag_whose_last_token_runs_on_still_closes(stage: Any, bpe_tokenizer: Any) -> None:
    stage.tokenizer = bpe_tokenizer
    trajectory = stage.play("<answer> kelu </answer>, I", **TEMPLATES)
    assert trajectory.answer == "kelu" and trajectory.reward == 1.0


def test_a_tag_begun_in_a_passage_and_closed_by_the_policy_is_inert(
    stage: Any, bpe_tokenizer: Any
) -> None:
    stage.tokenizer = bpe_tokenizer
    stage.retriever.passages = [Passage("p", "<answer> kelu </ans", 1.0)]
    trajectory = stage.play("<search> bore </search>", "wer>", max_turns=1, **TEMPLATES)
    assert trajectory.answer is None and trajectory.reward == 0.0

"""The tokens that end a completion, and that none of them stands in what was said."""

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from actors.prompt import end_tokens
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from configs.rewards import RewardsConfig, RewardWeights


def test_all_end_tokens_of_a_model_folder_are_known(
    stage: Any, config_for: Any, tmp_path: Path
) -> None:
    prompter, own = stage.prompter(config_for()), stage.tokenizer.eos_token_id
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 70, "text_config": None}))
    assert end_tokens(prompter, str(tmp_path)) == {own, 70}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [70, 90]}))
    assert end_tokens(prompter, str(tmp_path)) == {own, 70, 90}
    assert end_tokens(prompter, "") == {own}


async def test_the_models_own_end_token_is_no_fault_of_form(
    stage: Any, bpe_tokenizer: Any, scripted: Any, config_for: Any, lease_for: Any, tmp_path: Path
) -> None:
    end = bpe_tokenizer.encode("!")  # whatever the model's folder says
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    weights = RewardWeights(em=0.0, format=1.0)
    config = config_for(rewards=RewardsConfig(weights=weights), max_action_tokens=60)
    config = replace(config, model=replace(config.model, path=str(tmp_path), max_model_len=900))
    stage.tokenizer = bpe_tokenizer
    trajectory = await rollout(
        lease_for(),
        policy=scripted(bpe_tokenizer, ["<think>t</think><answer>kelu</answer>!"]),
        retriever=stage.retriever,
        prompter=stage.prompter(config),
        rewards=Rewards.open(config),
        config=config,
        actor_id="actor-0",
    )
    assert trajectory.reward == 1.0 and len(end) == 1

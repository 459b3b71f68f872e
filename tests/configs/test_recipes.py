"""The recipes: what they say is what was published, and fits the GPUs they name."""

from operator import attrgetter
from typing import Any

import msgspec
import pytest

from configs.load import load
from configs.rewards import RewardWeights
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts.setup.gpu_memory import GIB, plan
from scripts.setup.model_size import Model

INDEX_BYTES = 7_000_000_000  # e5_Flat.index in halves over 8 GPUs, with FAISS's own room
PER_BATCH = 10  # optimiser steps on each of Search-R1's batches: 512 x 5 rollouts in parts of 256
SEARCH_R1 = {  # scripts/nq_hotpotqa/v0.2/train_grpo.sh
    "model.max_model_len": 4096 + 500,
    "retrieval.top_k": 3,
    "retrieval.device": "cuda",
    "retrieval.index_device": "cuda",
    "actors.max_turns": 4,
    "actors.max_action_tokens": 500,
    # wiki-18's titles stand in quotes, and there they are shown with them
    "actors.passage_template": 'Doc {rank}(Title: "{title}") {text}\n',
    "actors.temperature": 1.0,
    "replay.groups_per_step": 512 // PER_BATCH,
    "replay.group_size": 5,
    "replay.max_staleness": PER_BATCH - 1,
    "learner.total_steps": 1005 * PER_BATCH,
    "learner.eval_every": 100 * PER_BATCH,
    "learner.checkpoint_every": 100 * PER_BATCH,
    "learner.objective": "grpo",
    "learner.proximal": "behaviour",
    "learner.clip_high": 0.2,
    "learner.kl_coef": 0.001,
    "learner.kl_estimator": "k3",
    "learner.anchor": "frozen",
    "learner.advantage_std": "group",
    "learner.lr": 1e-6,
    "learner.lr_schedule": "constant",
    "learner.warmup_steps": int(0.285 * 1005) * PER_BATCH,
    "learner.betas": (0.9, 0.999),
    "learner.weight_decay": 0.01,
    "learner.max_grad_norm": 1.0,
}
EMA_PG = SEARCH_R1 | {  # search/train_grpo_ema_pg.sh
    "learner.eval_every": 50 * PER_BATCH,
    "learner.checkpoint_every": 50 * PER_BATCH,
    "learner.clip_high": None,  # grpo's own: .28
    "learner.kl_estimator": "k3++",  # for the top-k KL
    "learner.anchor": "ema",
    "learner.anchor_tau": 0.9,
    "learner.anchor_period": 10 * PER_BATCH,
    "learner.betas": (0.9, 0.95),
}
ASEARCHER = {  # ASearcher/configs/asearcher_local.yaml
    "model.max_model_len": 12000,
    "retrieval.top_k": 5,
    "retrieval.device": "cuda",
    "retrieval.index_device": "cuda",
    "rewards.mode": "strict",
    "rewards.weights": RewardWeights(em=0.0, f1=1.0),
    "actors.max_turns": 32 - 1,
    "actors.max_action_tokens": 1024,
    "actors.temperature": 1.0,
    "rewards.weights.em": 0.0,
    "rewards.weights.f1": 1.0,
    "replay.groups_per_step": 128,
    "replay.group_size": 16,
    "replay.max_staleness": 4,
    "replay.drop_no_signal": True,
    "learner.total_steps": 10 * (35_000 // 128),
    "learner.proximal": "start_of_update",
    "learner.clip_low": 0.4,
    "learner.clip_high": 0.4,
    "learner.behaviour_weight": "mask",
    "learner.behaviour_level": "token",
    "learner.behaviour_cap": 5.0,
    "learner.kl_coef": 0.0,
    "learner.advantage_std": "batch",
    "learner.lr": 5e-6,
    "learner.lr_schedule": "constant",
    "learner.warmup_steps": int(0.001 * 10 * (35_000 // 128)),
    "learner.betas": (0.9, 0.999),
    "learner.weight_decay": 0.01,
    "learner.max_grad_norm": 1.0,
}
QWEN_3B = Model(
    hidden=2048, layers=36, intermediate=11_008, queries=2048, keys=256, vocabulary=151_936,
    weights=(311_164_928, 2_774_773_760),
)  # fmt: skip
QWEN_7B = Model(
    hidden=3584, layers=28, intermediate=18_944, queries=3584, keys=512, vocabulary=152_064,
    weights=(544_997_376, 544_997_376, 6_525_621_760),
)  # fmt: skip
RECIPES: dict[str, tuple[dict[str, Any], Model]] = {
    "search_r1_3b_grpo": (SEARCH_R1, QWEN_3B),
    "search_r1_7b_grpo": (SEARCH_R1, QWEN_7B),
    "ema_pg_3b": (EMA_PG, QWEN_3B),
    "asearcher_7b": (ASEARCHER, QWEN_7B),
}


def recipe(name: str) -> Config:
    return load(REPOSITORY / "configs" / f"{name}.yaml")


def value(config: Config, field: str) -> Any:
    return attrgetter(field)(config)


@pytest.mark.parametrize("name", RECIPES)
def test_the_numbers_are_those_published(name: str) -> None:
    config, published = recipe(name), RECIPES[name][0]
    assert {field: value(config, field) for field in published} == published


@pytest.mark.parametrize("name", RECIPES)
def test_every_gpu_holds_what_the_comment_says(name: str) -> None:
    config, model = recipe(name), RECIPES[name][1]
    text = " ".join((REPOSITORY / "configs" / f"{name}.yaml").read_text().replace("#", " ").split())
    lines = list(plan(config, model, [80 * GIB - INDEX_BYTES] * 8))
    assert len(lines) == 8 and all(fits for _, fits in lines)
    needed = [line.split("about ")[1].split(" of ")[0] for line, _ in (lines[0], lines[-1])]
    assert f"a learner's GPU about {needed[0]} GiB, an actor's {needed[1]}" in text


@pytest.mark.parametrize(
    ("field", "taken_back"),
    [
        ("anchor", "frozen"),
        ("kl_estimator", "k3"),
        ("clip_high", 0.2),
        ("betas", (0.9, 0.999)),
    ],
)
def test_each_change_of_ema_pg_can_be_taken_back_alone(field: str, taken_back: Any) -> None:
    plain, changed = recipe("search_r1_3b_grpo").learner, recipe("ema_pg_3b").learner
    different = {n for n in plain.__struct_fields__ if getattr(plain, n) != getattr(changed, n)}
    cadence = {"anchor_period", "eval_every", "checkpoint_every"}
    assert different - cadence == {"anchor", "kl_estimator", "clip_high", "betas"}
    text = str(list(taken_back) if isinstance(taken_back, tuple) else taken_back)
    config = load(REPOSITORY / "configs" / "ema_pg_3b.yaml", [f"learner.{field}={text}"])
    assert config.learner == msgspec.structs.replace(changed, **{field: taken_back})


@pytest.mark.parametrize("name", RECIPES)
def test_paths_are_left_to_whoever_runs_it(name: str) -> None:
    config = recipe(name)
    paths = (config.model.path, config.questions.train, config.questions.eval, config.run_dir)
    assert not any(paths) and not config.retrieval.corpus and not config.retrieval.index

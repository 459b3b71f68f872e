"""Random rollouts on three tokenizers: what is trained is what went through the policy, and masks
are where it spoke."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.prompt import Prompter
from actors.rewards.scorer import Rewards
from actors.token_audit import TokenAudit
from configs.load import load
from configs.runtime.files import MOST_IDS
from configs.runtime.process import REPOSITORY
from configs.schema import ActorsConfig, Config, LearnerConfig, ModelConfig, QuestionsConfig
from learner.batch import build
from replay.codec import encode_trajectory
from replay.protocol import Batch, Lease
from replay.trajectory import Question, Sampling, StopReason, Trajectory
from tests.actors.babble import AnyRetriever, Babbler

QUESTION = Question("q", "who is the mayor of bore ?", ("gold",))
TOKENIZERS = ("qwen_tokenizer", "llama_tokenizer", "demo_tokenizer")
AT_ONCE = 60  # a batch of the learner's: groups of two
COUNT = 10_000 // len(TOKENIZERS) // AT_ONCE * AT_ONCE + AT_ONCE
Told = tuple[Trajectory, Babbler]


def settings(name: str) -> Config:
    """The demo's own, or one in which passages are cut and contexts run full."""
    if name == "demo_tokenizer":
        path = REPOSITORY / "configs" / "demo.yaml"
        return load(path, ["model.max_model_len=70", "actors.max_action_tokens=12"])
    return Config(
        model=ModelConfig(max_model_len=230),
        questions=QuestionsConfig(prompt="{question}"),
        actors=ActorsConfig(max_turns=3, max_action_tokens=40, max_passage_tokens=30),
    )


async def rolled_out(audit: TokenAudit, first: int, **parts: Any) -> list[Told]:
    """AT_ONCE rollouts, each with a random policy and a random retriever of its own."""
    told = []
    tokenizer = parts.pop("tokenizer")
    for number in range(first, first + AT_ONCE):
        chance = random.Random(number)
        policy = Babbler(tokenizer, chance, {tokenizer.eos_token_id})
        lease = Lease(number // 2, number % 2, "train", QUESTION, Sampling(1.0, 11))
        trajectory = await audit.rollout(
            lease, policy=policy, retriever=AnyRetriever(chance), actor_id="actor", **parts
        )
        told.append((trajectory, policy))
    return told


def naive(policy: Babbler) -> tuple[list[int], list[bool]]:
    """Every id that went through the policy, in order, and whether it was sampled."""
    tokens: list[int] = []
    sampled: list[bool] = []
    for prompt, said in policy.heard:
        assert prompt[: len(tokens)] == tokens
        read = prompt[len(tokens) :]
        tokens += read + said
        sampled += [False] * len(read) + [True] * len(said)
    return tokens, sampled


def check_masks(told: Sequence[Told]) -> None:
    """The learner's rows are the naive ones, each padded to its micro-batch."""
    payloads = [encode_trajectory(trajectory) for trajectory, _ in told]
    groups = tuple(zip(payloads[::2], payloads[1::2], strict=True))
    ids = tuple(trajectory.group_id for trajectory, _ in told[::2])
    batch = Batch(3, ids, (0,) * len(ids), groups, {}, {}, ())
    seen = []
    for micro in build(
        batch, LearnerConfig(micro_batch_tokens=2000), vocabulary=MOST_IDS
    ).micro_batches:
        rows = zip(micro.row_ids.tolist(), micro.tokens, micro.loss_mask, strict=True)
        for index, row, mask in rows:
            tokens, sampled = naive(told[index][1])
            padding = len(row) - len(tokens)
            assert row.tolist() == tokens + [0] * padding
            assert mask.tolist() == sampled + [False] * padding
            seen.append(index)
    assert sorted(seen) == list(range(len(told)))


def drifts(tokenizer: Any, trajectory: Trajectory) -> bool:
    """True where tokenising its text again would give other ids."""
    text = tokenizer.decode(
        trajectory.sequences[0].tokens.tolist(), clean_up_tokenization_spaces=False
    )
    again = tokenizer.encode(text, add_special_tokens=False)
    return not np.array_equal(again, trajectory.sequences[0].tokens)


async def check(tokenizer: Any, name: str, count: int) -> None:
    """Play, compare, and see that nearly everything that can happen did."""
    config = settings(name)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    audit, seen = TokenAudit(prompter, config), Counter[Any]()
    for first in range(0, count, AT_ONCE):
        parts = {"prompter": prompter, "rewards": Rewards.open(config), "config": config}
        told = await rolled_out(audit, first, tokenizer=tokenizer, **parts)
        check_masks(told)
        for trajectory, policy in told:
            seen.update(policy.reasons)
            seen[trajectory.stop_reason] += 1
            seen["several turns"] += len(trajectory.turns) > 1
            seen["drift"] += drifts(tokenizer, trajectory)
    assert audit.gauges() == {"actor/token_mismatch": 0.0}
    reached = (StopReason.ANSWERED, StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT)
    assert all(seen[each] for each in (*reached, "stop", "length", "several turns", "drift")), seen


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_what_is_trained_is_what_went_through_the_policy(
    request: pytest.FixtureRequest, name: str
) -> None:
    await check(request.getfixturevalue(name), name, 2 * AT_ONCE)


@pytest.mark.slow
@pytest.mark.soak("examples")
@pytest.mark.parametrize("name", TOKENIZERS)
async def test_so_it_is_in_ten_thousand_rollouts(request: pytest.FixtureRequest, name: str) -> None:
    await check(request.getfixturevalue(name), name, COUNT)

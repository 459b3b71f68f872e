"""A run in one process: which groups count."""

import asyncio
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from actors.errors import EngineDead, EngineUnusable, GenerationFailed
from actors.policies.base import Completion, Stops
from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter
from actors.rewards.custom import UserReward
from actors.rewards.scorer import Rewards
from actors.rewards.transcript import Transcript
from actors.token_audit import TokenAudit
from configs.environment import EnvironmentConfig
from configs.rewards import RewardsConfig, RewardWeights
from configs.schema import (
    ActorsConfig,
    Config,
    LearnerConfig,
    ModelConfig,
    QuestionsConfig,
    ReplayConfig,
    RetrievalConfig,
)
from configs.sentinels import SentinelsConfig
from learner.errors import BadBatch
from replay.protocol import Lease
from replay.trajectory import Trajectory
from retrieval_server.protocol import Passage
from scripts import train_sync
from scripts.train_sync import (
    NothingToLearn,
    Rollouts,
    RolloutsFailed,
    Watch,
    learn,
    roll_out_and_train,
    take_steps,
)
from tests.scripts.conftest import RecordedRun


class Silent:
    """A policy that says one word, and a retriever that nobody asks."""

    def __init__(self, failures: Sequence[Exception | None] = ()) -> None:
        self.temperatures: list[float] = []
        self.seeds: list[int] = []
        self._failures = iter(failures)

    async def complete(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> Completion:
        self.temperatures.append(temperature)
        self.seeds.append(seed)
        if (error := next(self._failures, None)) is not None:
            raise error
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
    rewards = iter((None, 0.0, 1.0, 1.0, 0.0, 1.0))
    batch = asyncio.run(rolling(config, word_tokenizer, Silent(), rewards).batch(0))
    assert batch.group_ids == (3,)


@pytest.mark.parametrize(
    ("temperature", "sampled"), [(1.0, {"sampled_em": 0.0}), (0.5, {"sampled_em": 0.0}), (None, {})]
)
def test_an_evaluation_is_exact_match(
    config: Config, word_tokenizer: Any, temperature: float | None, sampled: dict[str, float]
) -> None:
    config = replace(config, learner=LearnerConfig(eval_temperature=temperature))
    silent = Silent()
    rollouts = rolling(config, word_tokenizer, silent, iter(()))
    assert asyncio.run(rollouts.evaluate()) == {"em": 0.0, "em_0_hops": 0.0} | sampled
    assert silent.temperatures == ([0.0] if temperature is None else [0.0, temperature])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "none of the first 4 closed train groups could be scored: .*mine:reward returned"),
        (0.0, "the last 10 closed train groups all had reward 0: no gradient"),
    ],
)
def test_where_nothing_is_to_be_learned_it_ends_as_the_fleet_does(
    config: Config, word_tokenizer: Any, value: float | None, said: str
) -> None:
    rollouts = rolling(config, word_tokenizer, Silent(), itertools.repeat(value))
    with pytest.raises(NothingToLearn, match=said):
        asyncio.run(rollouts.batch(0))


def test_a_run_that_ends_early_keeps_what_it_has_learned(
    config: Config, word_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pushed(*_: object) -> None: ...

    monkeypatch.setattr(train_sync, "push", pushed)
    monkeypatch.setattr(train_sync, "learn", lambda *_: 0.5)
    rewards = itertools.chain((0.0, 1.0), itertools.repeat(0.0))
    rollouts = rolling(config, word_tokenizer, Silent(), rewards)
    nobody: Any = None
    summary = asyncio.run(take_steps(SimpleNamespace(config=config), rollouts, nobody, tmp_path))
    assert summary["losses"] == [0.5] and summary["em"] == 0.0
    assert summary["stopped"] == "the last 10 closed train groups all had reward 0: no gradient"


def test_the_cause_of_a_failed_engine_is_read_from_its_log(
    config: Config, word_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_: Config, **_given: object) -> NoReturn:
        os.write(1, b"(EngineCore pid=1) ERROR ValueError: too long\nbye\n")
        raise EngineUnusable("see root cause above")

    monkeypatch.setattr(VllmPolicy, "start", start)
    config = msgspec.structs.replace(
        config,
        run_dir=str(tmp_path),
        environment=EnvironmentConfig(name="no_search"),
        retrieval=RetrievalConfig(port=1),
    )
    with pytest.raises(EngineUnusable) as raised:
        roll_out_and_train(SimpleNamespace(config=config), word_tokenizer)
    log = tmp_path / "engine.log"
    assert str(raised.value) == f"see root cause above: ValueError: too long; see {log}"


def rolling(config: Config, tokenizer: Any, policy: Silent, rewards: Iterator[float | None]) -> Any:
    """The rollouts of this policy, rewarded so."""
    prompter = Prompter(tokenizer, config.questions, config.actors)
    audit, scored = TokenAudit(prompter, config), rewarding(rewards)

    async def roll(lease: Lease) -> Trajectory:
        return await audit.rollout(
            lease,
            policy=policy,
            retriever=policy,
            prompter=prompter,
            rewards=scored,
            config=config,
            actor_id="sync",
        )

    return Rollouts(config, roll)


def test_a_failed_rollout_is_made_again(
    config: Config, word_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Silent([TimeoutError(), GenerationFailed("aborted")])
    rollouts = rolling(config, word_tokenizer, policy, iter((0.0, 1.0)))
    assert asyncio.run(rollouts.batch(0)).group_ids == (1,)
    assert len(set(policy.seeds)) == len(policy.seeds) == 4  # another attempt has other seeds
    said = capsys.readouterr().err
    assert "rollout took over 240 s" in said and "GenerationFailed: aborted" in said


def test_so_is_one_that_no_record_holds(
    config: Config, word_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = rolling(config, word_tokenizer, Silent(), iter((0.0, 1.0, 0.0)))
    good = rollouts._roll

    async def roll(lease: Lease) -> Trajectory:
        made = await good(lease)
        return made if lease.attempt or lease.sibling else replace(made, actor_id="x" * 2000)

    batch = asyncio.run(Rollouts(config, roll).batch(0))
    assert batch.group_ids == (1,) and len(batch.groups[0]) == 2
    assert "group 1 sibling 0: CodecError: Trajectory: Expected `str`" in capsys.readouterr().err


def test_a_group_that_keeps_failing_is_replaced(config: Config, word_tokenizer: Any) -> None:
    attempts = config.replay.max_question_failures
    policy = Silent([TimeoutError()] * (2 * attempts - 1))  # one sibling fails as often, at least
    rollouts = rolling(config, word_tokenizer, policy, iter((1.0, 0.0, 1.0, 0.0)))
    assert asyncio.run(rollouts.batch(0)).group_ids == (2,)


def test_where_everything_fails_the_run_ends_by_name(config: Config, word_tokenizer: Any) -> None:
    policy = Silent([GenerationFailed("no room")] * 1000)
    rollouts = rolling(config, word_tokenizer, policy, iter(()))
    with pytest.raises(RolloutsFailed, match=r"4 groups in a row .* GenerationFailed: no room"):
        asyncio.run(rollouts.batch(0))


def test_a_dead_engine_is_named_at_once(config: Config, word_tokenizer: Any) -> None:
    policy = Silent([EngineDead("its process is gone")])
    rollouts = rolling(config, word_tokenizer, policy, iter(()))
    with pytest.raises(EngineDead):
        asyncio.run(rollouts.batch(0))


@pytest.mark.parametrize(("total", "stops"), [(20, True), (10, False)])
def test_a_sentinel_ends_it_as_it_ends_the_fleet(
    total: int,
    stops: bool,
    config: Config,
    word_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    async def pushed(*_: object) -> None: ...

    def learned(trainer: Any, batch: Any, watch: Watch) -> float:
        watch.take(batch.step, {"learner/current_ess": 0.1})
        return 0.5

    monkeypatch.setattr(train_sync, "push", pushed)
    monkeypatch.setattr(train_sync, "learn", learned)
    given = msgspec.structs.replace(
        config,
        run_dir=str(tmp_path),
        sentinels=SentinelsConfig(ess="stop"),
        learner=msgspec.structs.replace(config.learner, total_steps=total),
    )
    rollouts = rolling(given, word_tokenizer, Silent(), itertools.cycle((0.0, 1.0)))
    nobody: Any = None
    summary = asyncio.run(take_steps(SimpleNamespace(config=given), rollouts, nobody, tmp_path))
    assert summary["losses"] == [0.5] * 10
    assert summary.get("stopped", "").startswith("sentinel ess at step 10: ") == stops
    assert "\nsentinel ess at step 10: " in capsys.readouterr().out


def test_an_evaluation_leaves_out_what_fails(config: Config, word_tokenizer: Any) -> None:
    policy = Silent([GenerationFailed("aborted")] * 1000)
    rollouts = rolling(config, word_tokenizer, policy, iter(()))
    assert asyncio.run(rollouts.evaluate())["em"] == 0.0


def test_recorded_ids_that_the_model_does_not_embed_are_refused_by_name(
    recorded_run: RecordedRun, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 2}')
    config = Config(model=ModelConfig(str(tmp_path)))
    trainer: Any = SimpleNamespace(config=config)  # which gets nothing to learn
    with pytest.raises(BadBatch, match=r"token id .*: the model's vocabulary has 2"):
        learn(trainer, recorded_run.train(0), Watch(config))

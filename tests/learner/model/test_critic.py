"""A critic on DeepSpeed beside the policy: against plain torch, and to the bit after a resume."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from configs.algorithm.critic import CriticConfig
from configs.lora import LoraConfig
from configs.runtime.files import MOST_IDS
from configs.schema import Config
from learner import checkpoint
from learner.batch import TrainingBatch, build
from learner.errors import BadCheckpoint, BadModel
from learner.model.ema import Averages
from learner.trainer import CRITIC, Trainer
from learner.update import update
from replay.protocol import Batch

SLOW = [(0, "float32"), (2, "float32"), (3, "float32")]
SLOW += [(stage, "bfloat16") for stage in (0, 1, 2, 3)]
SETTINGS = [(1, "float32"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.fixture
def ppo(config: Config) -> Config:
    learner = msgspec.structs.replace(
        config.learner,
        baseline="critic",
        critic=CriticConfig(lr=3e-3, warmup_steps=2, updates=2, value_clip=0.2, gae_lambda=0.9),
        advantage_std="whiten",
        micro_batch_tokens=60,
    )
    return msgspec.structs.replace(config, learner=learner)


def at(config: Config, stage: int, dtype: str = "float32", **fields: Any) -> Config:
    learner = msgspec.structs.replace(config.learner, zero_stage=stage, **fields)
    model = msgspec.structs.replace(config.model, dtype=dtype)
    return msgspec.structs.replace(config, learner=learner, model=model)


def on_the_policy(config: Config, **fields: Any) -> Config:
    critic = CriticConfig(on="policy", coef=0.5, lr=3e-3, warmup_steps=2, gae_lambda=0.9)
    return at(config, 1, critic=critic, **fields)


@pytest.fixture
def batches(batch: Callable[..., Batch], ppo: Config) -> list[TrainingBatch]:
    steps = [batch(step, step - 1, groups=3) for step in range(1, 5)]
    return [build(each, ppo.learner, vocabulary=MOST_IDS) for each in steps]


@contextmanager
def training(config: Config) -> Iterator[Trainer]:
    with closing(Trainer(config)) as trainer:
        yield trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Both models', or the policy's and all masters."""
    both = {"policy": trainer.engine} | ({"critic": trainer.critic} if trainer.critic else {})
    found = {f"{k} {n}": w.clone() for k, each in both.items() for n, w in each.named_weights()}
    masters = trainer.engine.shards.masters()
    return found | {f"master {n}": w.clone() for n, w in masters.items()}


LORA = {"lora": LoraConfig(rank=4)}
SHARED = [
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            *((1, "float32", {}), (3, "float32", {})),
            *((1, "bfloat16", {}), (1, "float32", LORA)),
        )
    ),
    *(
        pytest.param(stage, dtype, {}, marks=pytest.mark.soak("ranks"))
        for stage, dtype in SLOW
        if (stage, dtype) not in ((3, "float32"), (1, "bfloat16"))
    ),
    pytest.param(3, "bfloat16", LORA, marks=pytest.mark.soak("ranks")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_resumed_steps_equal_the_undisturbed_ones_bit_for_bit(
    ppo: Config, batches: list[TrainingBatch], tmp_path: Path, stage: int, dtype: str
) -> None:
    last = require_resumed(at(ppo, stage, dtype), batches, tmp_path)
    assert "critic head.weight" in last and "critic trunk.embed_tokens.weight" in last


@pytest.mark.parametrize(("stage", "dtype", "more"), SHARED)
def test_the_same_on_the_policy_s_trunk(
    ppo: Config,
    batches: list[TrainingBatch],
    tmp_path: Path,
    stage: int,
    dtype: str,
    more: dict[str, Any],
) -> None:
    config = at(on_the_policy(ppo, anchor="ema", kl_coef=0.1, **more), stage, dtype)
    require_resumed(config, batches, tmp_path)
    assert not (tmp_path / "at-2" / CRITIC).exists()
    state = load_file(tmp_path / "at-2" / "state" / "rank-0.safetensors")
    assert state["master/value_head.weight"].any()
    for kind in tmp_path.glob("at-2/*/*.safetensors"):
        named = load_file(kind)
        assert kind.parent.name == "state" or not [n for n in named if "value_head" in n]


def require_resumed(
    config: Config, batches: list[TrainingBatch], tmp_path: Path
) -> dict[str, torch.Tensor]:
    """Fail unless steps go on as if never interrupted; what is trained in the end."""
    with training(config) as trainer:
        trainer.export(tmp_path / "at-0")
        first = [trainer.learn([each]) for each in batches[:2]]
        trainer.export(tmp_path / "at-2")
        expected = [trainer.learn([each]) for each in batches[2:]]
        last = weights(trainer)
    with training(config) as trainer:
        trainer.restore(tmp_path / "at-2")
        assert [trainer.learn([each]) for each in batches[2:]] == expected
        assert all(torch.equal(found, last[name]) for name, found in weights(trainer).items())
        trainer.restore(tmp_path / "at-2")  # also over a life that has gone on
        assert trainer.learn([batches[2]]) == expected[0]
        trainer.restore(tmp_path / "at-0")  # where the optimiser has no moments yet
        assert [trainer.learn([each]) for each in batches[:2]] == first
    return last


@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 2, 3))]
)
def test_steps_equal_plain_torch(
    ppo: Config,
    batches: list[TrainingBatch],
    make_plain_engine: Callable[..., Any],
    make_plain_critic: Callable[..., Any],
    stage: int,
) -> None:
    config = at(ppo, stage, max_grad_norm=1e9)
    engine, critic = make_plain_engine(config), make_plain_critic(config)
    averages = Averages.begin(engine, config.learner)
    with training(config) as trainer:
        for each in batches[:2]:
            gauges = trainer.learn([each])
            expected = update(engine, averages, each, config.learner, critic)
            assert gauges == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert expected["learner/explained_variance"] > -1.0
    assert expected["learner/value_clip_fraction"] >= 0.0


@pytest.mark.parametrize(
    "stage",
    [
        *(1, pytest.param(3, marks=pytest.mark.slow)),
        *(pytest.param(each, marks=pytest.mark.soak("ranks")) for each in (0, 2)),
    ],
)
def test_steps_on_the_policy_s_trunk_equal_plain_torch(
    ppo: Config, batches: list[TrainingBatch], make_plain_engine: Callable[..., Any], stage: int
) -> None:
    config = at(on_the_policy(ppo, max_grad_norm=0.5), stage)
    engine = make_plain_engine(config)
    averages = Averages.begin(engine, config.learner)
    with training(config) as trainer:
        for each in batches:
            gauges = trainer.learn([each])
            expected = update(engine, averages, each, config.learner)
            assert gauges == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert expected["learner/critic_lr"] == 3e-3 and expected["learner/lr"] == 1e-2
    assert expected["learner/value_mean"] != 0.0 and "learner/explained_variance" in expected


@pytest.mark.slow
@pytest.mark.parametrize("on", ["copy", "policy"])
def test_steps_go_on_at_another_zero_stage(
    ppo: Config, batches: list[TrainingBatch], tmp_path: Path, on: str
) -> None:
    config = on_the_policy(ppo) if on == "policy" else ppo
    with training(at(config, 1)) as trainer:
        for each in batches[:2]:
            trainer.learn([each])
        trainer.export(tmp_path)
        expected = trainer.learn([batches[2]])
    for stage in (3, 0):
        with training(at(config, stage)) as trainer:
            trainer.restore(tmp_path)
            found = trainer.learn([batches[2]])
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_checkpoint_without_the_critic_is_refused(
    ppo: Config, batches: list[TrainingBatch], word_tokenizer: Any, tmp_path: Path
) -> None:
    with training(ppo) as trainer:
        trainer.learn([batches[0]])
        folder = checkpoint.save(ppo, 1, trainer, word_tokenizer)
        checkpoint.check(checkpoint.read(folder), ppo)
        (folder / CRITIC / "rank-0.safetensors").unlink()
        with pytest.raises(BadCheckpoint, match=r"critic/rank-0\.safetensors is missing"):
            checkpoint.check(checkpoint.read(folder), ppo)
        with pytest.raises(BadModel, match="critic"):
            trainer.restore(folder)
    plain = msgspec.structs.replace(
        ppo.learner, baseline="mean", advantage_std="group", critic=CriticConfig()
    )
    with pytest.raises(BadCheckpoint, match=r"learner\.baseline = 'critic' there, 'mean' here"):
        checkpoint.check(checkpoint.read(folder), msgspec.structs.replace(ppo, learner=plain))
    assert json.loads((folder / "checkpoint.json").read_text())["step"] == 1

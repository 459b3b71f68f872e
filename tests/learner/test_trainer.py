"""The trainer on one rank: what it exports, what it takes back, and what it refuses."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from configs.lora import LoraConfig
from configs.runtime.files import MOST_IDS
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.batch import TrainingBatch, build
from learner.checkpoint import Checkpoint, Manifest, check
from learner.errors import BadCheckpoint, BadModel
from learner.model import peft_folder
from learner.trainer import Trainer
from replay.protocol import Batch

WEIGHTS = "model.safetensors"
SETTINGS = [
    (0, "float32"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in ((1, "float32"), (3, "float32"), (1, "bfloat16"))
    ),
    pytest.param(0, "bfloat16", marks=pytest.mark.soak("ranks")),
]


def with_learner(config: Config, dtype: str = "float32", **fields: Any) -> Config:
    learner = msgspec.structs.replace(config.learner, **fields)
    model = msgspec.structs.replace(config.model, dtype=dtype)
    return msgspec.structs.replace(config, learner=learner, model=model)


@contextmanager
def training(config: Config) -> Iterator[Trainer]:
    trainer = Trainer(config)
    yield trainer
    trainer.close()


@pytest.fixture
def batches(batch: Callable[..., Batch], config: Config) -> list[TrainingBatch]:
    learner = msgspec.structs.replace(config.learner, micro_batch_tokens=60)
    return [
        build(batch(step, step - 1, groups=3), learner, vocabulary=MOST_IDS) for step in range(1, 5)
    ]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.named_weights()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


LORA = LoraConfig(rank=4, publish="merged")
ADAPTED = [
    (1, "float32", LORA),
    *(
        pytest.param(*each, LORA, marks=pytest.mark.soak("ranks"))
        for each in ((0, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16"))
    ),
]


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_resumed_steps_equal_the_undisturbed_ones_bit_for_bit(
    config: Config, batches: list[TrainingBatch], tmp_path: Path, stage: int, dtype: str
) -> None:
    require_resumed(config, batches, tmp_path, stage, dtype, LoraConfig())


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype", "lora"), ADAPTED)
def test_the_same_of_an_adapter(
    config: Config,
    batches: list[TrainingBatch],
    tmp_path: Path,
    stage: int,
    dtype: str,
    lora: LoraConfig,
) -> None:
    require_resumed(config, batches, tmp_path, stage, dtype, lora)


def require_resumed(
    config: Config,
    batches: list[TrainingBatch],
    tmp_path: Path,
    stage: int,
    dtype: str,
    lora: LoraConfig,
) -> None:
    config = with_learner(config, dtype, zero_stage=stage, anchor="ema", kl_coef=0.1, lora=lora)
    with training(config) as trainer:
        trainer.export(tmp_path / "at-0")
        first = [trainer.learn([each]) for each in batches[:2]]
        trainer.export(tmp_path / "at-2")
        expected = [trainer.learn([each]) for each in batches[2:]]
        last, noise = weights(trainer), torch.rand(3)
    with training(config) as trainer:
        trainer.restore(tmp_path / "at-2")
        assert [trainer.learn([each]) for each in batches[2:]] == expected
        assert equal(weights(trainer), last) and torch.equal(torch.rand(3), noise)
        trainer.restore(tmp_path / "at-2")  # also over a life that has gone on
        assert trainer.learn([batches[2]]) == expected[0]
        trainer.restore(tmp_path / "at-0")  # where the optimiser has no moments yet
        assert [trainer.learn([each]) for each in batches[:2]] == first


def test_lower_rates_are_the_configured_ones_so_many_times(
    config: Config, batches: list[TrainingBatch]
) -> None:
    with training(with_learner(config, zero_stage=0)) as trainer:
        rates = [trainer.learn([batches[0]])["learner/lr"]]
        for scale in (0.5, 0.25):
            trainer.scale_rates(scale)
            rates.append(trainer.learn([batches[1]])["learner/lr"])
        assert rates == [1e-2, 0.5e-2, 0.25e-2]


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    kinds = ("model", "ema", "anchor")
    return {f"{k}/{n}": w for k in kinds for n, w in load_file(folder / k / WEIGHTS).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak("ranks"))]
)
def test_steps_go_on_at_another_zero_stage(
    config: Config, batches: list[TrainingBatch], tmp_path: Path, dtype: str
) -> None:
    settings = {"anchor": "ema", "kl_coef": 0.1, "anchor_period": 2, "lr": 1e-3}
    with training(with_learner(config, dtype, zero_stage=1, **settings)) as trainer:
        for each in batches[:2]:
            trainer.learn([each])
        trainer.export(tmp_path / "1")
        expected = trainer.learn([batches[2]])
    for stage, made_at in ((3, 1), (0, 3), (2, 0)):
        with training(with_learner(config, dtype, zero_stage=stage, **settings)) as trainer:
            trainer.restore(tmp_path / str(made_at))
            trainer.export(tmp_path / str(stage))
            gauges = trainer.learn([batches[2]])
        assert equal(exported_weights(tmp_path / str(stage)), exported_weights(tmp_path / "1"))
        if dtype == "float32":  # at stage 3 bf16 rounds elsewhere
            for name in ("learner/loss", "learner/grad_norm", "learner/anchor_kl"):
                assert gauges[name] == pytest.approx(expected[name], rel=1e-5), (stage, name)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_offloaded_steps_equal_those_on_the_device_and_resume_bit_for_bit(
    config: Config, batches: list[TrainingBatch], tmp_path: Path, stage: int
) -> None:
    here = with_learner(config, "bfloat16", zero_stage=stage, anchor="ema", kl_coef=0.1)
    with training(here) as trainer:
        device = [trainer.learn([each]) for each in batches[:3]]
    there = with_learner(here, "bfloat16", offload="cpu")
    with training(there) as trainer:
        host = [trainer.learn([each]) for each in batches[:3]]
        masters = trainer.engine.shards.masters()
        held = [*masters.values(), *trainer.averages.proximal.master.values()]
        assert {value.device.type for value in held} == {"cpu"}
        trainer.export(tmp_path)
        expected = trainer.learn([batches[3]])
    for ours, theirs in zip(host, device, strict=True):
        for name in ("learner/loss", "learner/grad_norm", "learner/entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=0.02, abs=1e-3), name
    with training(there) as trainer:
        for _ in range(2):  # also over a life that has gone on
            trainer.restore(tmp_path)
            assert trainer.learn([batches[3]]) == expected


@pytest.fixture(scope="module")
def exported(
    tiny_model_path: Path, batch: Callable[..., Batch], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Path, dict[str, torch.Tensor]]:
    """A configuration, what one step of it exported, and the weights it had."""
    config = Config(
        model=ModelConfig(path=str(tiny_model_path), dtype="float32"),
        learner=LearnerConfig(
            lr=1e-2, warmup_steps=0, zero_stage=3, anchor="frozen", proximal_decay=0.75
        ),
    )
    folder = tmp_path_factory.mktemp("exported")
    with training(config) as trainer:
        trainer.learn([build(batch(1, 0), config.learner, vocabulary=MOST_IDS)])
        trainer.export(folder)
        return config, folder, weights(trainer)


@pytest.mark.slow
def test_the_exported_model_is_the_one_in_training(
    exported: tuple[Config, Path, dict[str, torch.Tensor]],
) -> None:
    config, folder, trained = exported
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert equal({n: w.detach() for n, w in loaded.named_parameters()}, trained)
    start = load_file(Path(config.model.path) / "model.safetensors")
    assert equal(load_file(folder / "anchor" / "model.safetensors"), start)
    average = load_file(folder / "ema" / "model.safetensors")
    for name, weight in average.items():
        torch.testing.assert_close(weight, 0.75 * start[name] + 0.25 * trained[name])


@pytest.mark.parametrize(
    ("dtype", "fields", "named"),
    [
        ("float32", {"optimiser": "sgd"}, "learner.optimiser = 'adamw' there, 'sgd' here"),
        ("float32", {"anchor": "none"}, "learner.anchor = 'frozen' there, 'none' here"),
        ("bfloat16", {}, "model.dtype = 'float32' there, 'bfloat16' here"),
    ],
)
def test_state_of_another_setting_is_refused_by_name(
    exported: tuple[Config, Path, dict[str, torch.Tensor]],
    dtype: str,
    fields: dict[str, Any],
    named: str,
) -> None:
    config, folder, _ = exported
    with (
        training(with_learner(config, dtype, **fields)) as trainer,
        pytest.raises(BadModel, match=f"{named}; resume with"),
    ):
        trainer.restore(folder)


def test_an_average_that_the_mode_does_not_use_is_not_kept_nor_saved(
    config: Config, batches: list[TrainingBatch], tmp_path: Path
) -> None:
    for fields in ({"proximal": "behaviour"}, {"objective": "reinforce"}):
        with training(with_learner(config, **fields)) as trainer:
            assert trainer.averages.all() == {}
            gauges = trainer.learn([batches[0]])
            trainer.export(tmp_path / "saved")
        assert not any("half_life" in name for name in gauges)
        assert {each.name for each in (tmp_path / "saved").iterdir()} == {"model", "state"}
        saved = load_file(tmp_path / "saved" / "state" / "rank-0.safetensors")
        assert not any(name.startswith("ema") for name in saved)


def test_averages_that_are_missing_are_refused_and_those_too_many_left_out(
    config: Config, batches: list[TrainingBatch], tmp_path: Path
) -> None:
    two_policies = with_learner(config, proximal="behaviour")
    with training(config) as trainer:
        trainer.learn([batches[0]])
        trainer.export(tmp_path / "with")
    with training(two_policies) as trainer:
        trainer.restore(tmp_path / "with")
        expected = trainer.learn([batches[1]])
        trainer.restore(tmp_path / "with")
        trainer.export(tmp_path / "without")
        assert trainer.learn([batches[1]]) == expected
    with training(config) as trainer:
        before = weights(trainer)
        with pytest.raises(BadModel, match=r"holds no 'ema', the average of learner.proximal = 'e"):
            trainer.restore(tmp_path / "without")
        assert equal(weights(trainer), before)


def test_state_of_another_architecture_is_refused(
    exported: tuple[Config, Path, dict[str, torch.Tensor]],
    make_tiny_model: Callable[[Path, Any], Path],
    bpe_tokenizer: Any,
    tmp_path: Path,
) -> None:
    config, folder, _ = exported
    other = ModelConfig(path=str(make_tiny_model(tmp_path / "other", bpe_tokenizer)))
    other = msgspec.structs.replace(other, dtype="float32")
    with training(msgspec.structs.replace(config, model=other)) as trainer:
        before = weights(trainer)
        with pytest.raises(BadModel, match=r"another architecture: model.path = 'Qwen2"):
            trainer.restore(folder)
        assert equal(weights(trainer), before)


def test_missing_and_broken_state_is_refused(
    exported: tuple[Config, Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    config, folder, _ = exported
    with training(config) as trainer:
        with pytest.raises(BadModel, match=r"state/rank-0.safetensors' cannot be read: No such"):
            trainer.restore(tmp_path)
        shutil.copytree(folder / "state", tmp_path / "state")
        (tmp_path / "state" / "rank-0.safetensors").write_bytes(b"\x08")
        with pytest.raises(BadModel, match="cannot be read"):
            trainer.restore(tmp_path)


def test_half_lives_are_reported_in_steps_and_in_staleness(
    config: Config, batch: Callable[..., Batch]
) -> None:
    config = with_learner(config, anchor="ema", proximal_decay=0.5, anchor_tau=0.5)
    with training(config) as trainer:
        gauges = trainer.learn([build(batch(5, 2), config.learner, vocabulary=MOST_IDS)])
    assert gauges["learner/ema_half_life_steps"] == 1.0
    assert gauges["learner/anchor_half_life_steps"] == 10.0
    assert gauges["learner/ema_half_life_staleness"] == pytest.approx(0.5)


@pytest.fixture(scope="module")
def adapted(
    tiny_model_path: Path, batch: Callable[..., Batch], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same of an adapter: its configuration, what was exported, merged weights, the adapter."""
    config = Config(
        model=ModelConfig(path=str(tiny_model_path), dtype="float32"),
        learner=LearnerConfig(
            lr=1e-2, warmup_steps=0, anchor="frozen", proximal_decay=0.75, lora=LoraConfig(rank=2)
        ),
    )
    folder = tmp_path_factory.mktemp("adapted")
    with training(config) as trainer:
        for step in (1, 2):
            made = build(batch(step, step - 1), config.learner, vocabulary=MOST_IDS)
            trainer.learn([made])
        trainer.export(folder)
        merged = {name: w.clone() for name, w in trainer.engine.named_weights()}
        return config, folder, merged, weights(trainer)


def test_an_adapter_is_exported_by_itself_and_once_in_the_model(
    adapted: tuple[Config, Path, dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    config, folder, merged, published = adapted
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert equal({n: w.detach() for n, w in loaded.named_parameters()}, merged)
    start = load_file(Path(config.model.path) / "model.safetensors")
    kept = peft_folder.read(folder / "adapter")
    for path, (a, b) in kept.layers.items():
        by_hand = start[f"{path}.weight"] + 32 / 2 * b @ a
        torch.testing.assert_close(merged[f"{path}.weight"], by_hand)
        assert not torch.equal(merged[f"{path}.weight"], start[f"{path}.weight"])
    changed = {name for name in merged if not torch.equal(merged[name], start[name])}
    assert changed == {f"{path}.weight" for path in kept.layers}
    assert equal(published, load_file(folder / "adapter" / peft_folder.WEIGHTS))


def test_averages_of_an_adapter_are_of_the_adapter_alone(
    adapted: tuple[Config, Path, dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    _, folder, _, published = adapted
    held = {kind: load_file(folder / kind / peft_folder.WEIGHTS) for kind in ("ema", "anchor")}
    assert not any(w.any() for name, w in held["anchor"].items() if "lora_B" in name)
    assert held["ema"].keys() == published.keys()
    moved = [n for n in published if not torch.equal(held["ema"][n], published[n])]
    assert len(moved) == len(published)
    size = (folder / "state" / "rank-0.safetensors").stat().st_size
    elements = sum(weight.numel() for weight in published.values())
    assert size < 1.2 * 4 * elements * 5  # the adapter, two moments, two averages


def test_a_checkpoint_of_an_adapter_needs_the_weights_it_was_trained_on(
    adapted: tuple[Config, Path, dict[str, torch.Tensor], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    config, folder, _, _ = adapted
    model = tmp_path / "model"
    shutil.copytree(config.model.path, model)
    ours = msgspec.structs.replace(config.model, path=str(model))
    config = msgspec.structs.replace(config, model=ours)
    made = Checkpoint(folder, Manifest.of(config, 2, 1))
    check(made, config)
    changed = load_file(model / WEIGHTS)
    changed["model.norm.weight"] += 1.0
    save_file(changed, model / WEIGHTS)
    with pytest.raises(BadCheckpoint, match=r"the digest of the weights in .* there, .* here"):
        check(made, config)

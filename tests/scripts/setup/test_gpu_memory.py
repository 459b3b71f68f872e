"""The arithmetic of what a GPU has to hold, and which one an actor gets."""

import re
from pathlib import Path

import msgspec
import pytest

from actors.policies.engine import gpu_of_actor
from configs.load import load
from configs.runtime.process import REPOSITORY
from configs.schema import ActorsConfig, Config
from scripts.setup import gpu_memory, machine
from scripts.setup.gpu_memory import GIB, Model, engine_needs, learner_needs, plan, read_model

QWEN_HALF_B = Model(494_032_768, 896, 24)
QWEN_7B = Model(7_615_616_512, 3584, 28)


@pytest.fixture
def one_gpu() -> Config:
    return load(REPOSITORY / "configs" / "one_gpu.yaml")


def test_a_half_billion_parameters_fit_24_gib(one_gpu: Config) -> None:
    ((line, fits),) = plan(one_gpu, QWEN_HALF_B, [24 * GIB])
    assert fits and re.match(r"GPU 0: about \d+\.\d of 24\.0 GiB: learner rank 0 12\.", line)
    assert (
        "optimiser, with fp32 weights 5.52" in line
        and "; actor-0 10.3 (weights 0.92, keys and values 6.00" in line
    )


def test_seven_billion_do_not(one_gpu: Config) -> None:
    ((line, fits),) = plan(one_gpu, QWEN_7B, [80 * GIB])
    assert not fits and "of 80.0 GiB" in line


def test_what_zero_shares_out() -> None:
    def needs(stage: int) -> dict[str, int]:
        config = load(
            REPOSITORY / "configs" / "base.yaml", ["learner.ranks=4", f"learner.zero_stage={stage}"]
        )
        return learner_needs(config, QWEN_HALF_B)

    names = ("optimiser, with fp32 weights", "gradients", "weights")
    for stage in range(4):
        whole = [needs(stage)[name] == needs(0)[name] for name in names]
        assert whole == [stage < 1, stage < 2, stage < 3]


def test_fp32_has_no_second_copy_of_the_weights(one_gpu: Config) -> None:
    config = load(REPOSITORY / "configs" / "one_gpu.yaml", ["model.dtype=float32"])
    optimiser = "optimiser, with fp32 weights"
    assert learner_needs(config, QWEN_HALF_B)[optimiser] == 8 * QWEN_HALF_B.parameters
    assert engine_needs(config, QWEN_HALF_B)["weights received"] == 4 * QWEN_HALF_B.parameters


def test_the_model_s_size_is_read_from_its_files(tiny_model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    found = read_model(tiny_model_path)
    assert found.parameters == model.num_parameters()
    assert (found.hidden, found.layers) == (
        model.config.hidden_size,
        model.config.num_hidden_layers,
    )


@pytest.mark.parametrize(
    ("ranks", "gpus", "homes"),
    [(1, 1, [0, 0, 0]), (1, 2, [1, 1, 1]), (1, 4, [1, 2, 3]), (2, 4, [2, 3, 2]), (4, 2, [0, 1, 0])],
)
def test_actors_take_the_gpus_that_the_learner_leaves(
    ranks: int, gpus: int, homes: list[int]
) -> None:
    assert [gpu_of_actor(index, ranks, gpus) for index in range(3)] == homes


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("one_gpu", [], "for 1: weight_sync.transport = 'cuda_ipc': on a machine"),
        (
            "base",
            ["weight_sync.transport=nccl", "actors.count=2"],
            "for 3 (learner.ranks = 1, actors.count = 2): we",
        ),
        ("asearcher_7b", [], "for 8 (learner.ranks = 4, actors.count = 4): retrieval.device = 'cu"),
    ],
)
def test_what_is_for_gpus_asks_for_them_first_and_for_no_memory(
    name: str, overrides: list[str], said: str
) -> None:
    config = load(REPOSITORY / "configs" / f"{name}.yaml", overrides)
    (problem,) = machine.lacks(config)
    assert problem.startswith(f"no GPU is visible, and this configuration is {said}")
    assert problem.endswith("on this one begin with configs/base.yaml")


def test_what_is_for_gpus_is_told_nothing_where_they_are(
    one_gpu: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "totals", lambda: [24 * GIB])
    assert machine.missing_gpus(one_gpu) == ""
    two = msgspec.structs.replace(one_gpu, actors=ActorsConfig(count=2))
    monkeypatch.setattr(gpu_memory, "totals", lambda: [24 * GIB] * 3)
    (problem,) = [each for each in machine.lacks(two) if "transport" in each]
    assert problem.startswith("weight_sync.transport = 'cuda_ipc' needs every model on one GPU")


@pytest.mark.parametrize(("gpus", "way"), [(0, "gloo"), (1, "cuda_ipc"), (2, "gloo"), (3, "nccl")])
def test_how_weights_will_travel_is_said_before(gpus: int, way: str, monkeypatch) -> None:
    monkeypatch.setattr(gpu_memory, "totals", lambda: [GIB] * gpus)
    config = load(REPOSITORY / "configs" / "base.yaml", ["actors.count=2"])
    assert machine.transport(config) == way

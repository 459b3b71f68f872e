"""The arithmetic of what a GPU has to hold, and which one an actor gets."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
import transformers

from actors.policies.engine import gpus_of_actor
from configs.load import load, parse
from configs.runtime.process import REPOSITORY
from configs.schema import ActorsConfig, Config
from scripts.setup import gpu_memory, machine
from scripts.setup.gpu_memory import GIB, engine_needs, learner_needs, plan
from scripts.setup.model_size import find_model, known_shape, model_of_shape, read_model
from scripts.setup.pace import Pace
from tests.scripts.setup.kept import kept_bytes

QWEN_HALF_B, QWEN_7B = find_model("Qwen2.5-0.5B"), find_model("Qwen2.5-7B")


@pytest.fixture
def one_gpu() -> Config:
    cache = f"actors.kv_cache_bytes={5 * GIB // 2}"
    return load(REPOSITORY / "configs" / "one_gpu.yaml", [cache, "learner.offload=none"])


def test_a_half_billion_parameters_fit_the_22_gib_of_an_a10g(one_gpu: Config) -> None:
    ((line, fits),) = plan(one_gpu, QWEN_HALF_B, [22 * GIB])
    assert fits and re.match(r"GPU 0: about \d+\.\d of 22\.0 GiB: learner rank 0 13\.8", line)
    assert (
        "optimiser, with fp32 weights 5.52" in line
        and "; actor-0 6.8 (weights 0.92, keys and values 2.50" in line
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


def test_a_copy_within_each_host_is_counted() -> None:
    def needs(*more: str) -> dict[str, int]:
        words = ["learner.ranks=8", "learner.zero_stage=3", *more]
        return learner_needs(load(REPOSITORY / "configs" / "base.yaml", words), QWEN_HALF_B)

    copy = needs("learner.hierarchical=true")
    assert copy.pop("weights within a node") == 2 * QWEN_HALF_B.parameters // 4
    assert copy == needs()


def test_a_critic_is_a_second_model_without_an_output_layer() -> None:
    def needs(*more: str) -> dict[str, int]:
        words = ["learner.ranks=4", "learner.zero_stage=3", "learner.anchor=none", *more]
        return learner_needs(load(REPOSITORY / "configs" / "base.yaml", words), QWEN_7B)

    with_critic = needs("learner.baseline=critic", "learner.advantage_std=whiten")
    trunk = QWEN_7B.parameters - 152_064 * 3584
    assert with_critic.pop("critic's optimiser") == 12 * trunk // 4
    own = with_critic.pop("critic, with its gradients")
    assert own == 2 * trunk // 4 + 4 * trunk // 4 + with_critic["reductions"]
    assert with_critic == needs()


def test_a_critic_on_the_policy_s_trunk_is_a_head_alone() -> None:
    def needs(*more: str) -> dict[str, int]:
        words = ["learner.micro_batch_tokens=8192", "model.max_model_len=4096", *more]
        return learner_needs(load(REPOSITORY / "configs" / "base.yaml", words), QWEN_7B)

    shared = ["learner.baseline=critic", "learner.advantage_std=whiten", "learner.critic.on=policy"]
    found, without = needs(*shared), needs()
    head = 3584 + 1
    states = 8192 * 3584 * (4 + 4 + 2)  # in fp32, their gradient, and that in bf16
    assert found.pop("value head, with its gradient") == 2 * head + states
    assert found["gradients"] - without["gradients"] == 4 * head
    own = "optimiser, with fp32 weights"
    assert found[own] - without[own] == 12 * head
    assert found.keys() == without.keys()


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
    shape = model.config
    assert (found.hidden, found.layers) == (shape.hidden_size, shape.num_hidden_layers)
    assert (found.intermediate, found.vocabulary) == (shape.intermediate_size, shape.vocab_size)


@pytest.mark.parametrize(
    ("name", "elements"),  # as published with the weights
    [
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen2.5-14B", 14_770_033_664),
        ("Qwen2.5-32B", 32_763_876_352),
    ],
)
def test_models_that_are_not_here_are_known_by_name(name: str, elements: int) -> None:
    assert find_model(name).parameters == elements


def test_a_name_that_is_not_known_needs_a_folder() -> None:
    with pytest.raises(FileNotFoundError):
        find_model("Qwen2.5-8B")
    assert known_shape("Qwen2.5-8B") == {}


SHAPES = {
    "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_what_autograd_keeps_of_a_layer_is_what_is_reckoned(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    kept, tokens = [], 256
    for layers in (1, 3):
        config = getattr(transformers, f"{kind}Config")(num_hidden_layers=layers, **SHAPES)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype))
        kept.append(kept_bytes(model, tokens))
    model.save_pretrained(tmp_path)
    expected = read_model(tmp_path).layer_bytes(2 if dtype == "bfloat16" else 4)
    assert (kept[1] - kept[0]) / 2 / tokens == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_a_shape_has_the_weights_of_the_model_that_is_made_of_it(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    shape = {**SHAPES, "num_hidden_layers": 3, "tie_word_embeddings": tied}
    config = getattr(transformers, f"{kind}Config")(**shape)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    saved = read_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert sorted(find_model(str(tmp_path)).weights) == sorted(saved.weights)
    assert find_model(str(tmp_path)).normed_heads == saved.normed_heads
    assert model_of_shape(config.to_dict()).kept == 2 * 3 * 2 * 32


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dtype", "stage"),
    [
        ("float32", 1),
        pytest.param("float32", 3, marks=pytest.mark.soak("ranks")),
        # A CPU that cannot multiply bf16 takes minutes.
        pytest.param("bfloat16", 1, marks=pytest.mark.soak("ranks")),
    ],
)
def test_a_learner_s_peak_is_what_is_reckoned(dtype: str, stage: int, tmp_path: Path) -> None:
    shape = {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 16_000,
        "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    words = ("-m", "tests.scripts.setup.learner_peak", str(tmp_path), dtype, str(stage))
    ended = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    reckoned = machine.PROCESS_BYTES + sum(found["needs"].values())
    assert reckoned == pytest.approx(found["peak"], rel=0.2), found


def test_an_average_that_is_not_kept_takes_nothing(one_gpu: Config) -> None:
    def averages(**fields: str) -> int:
        learner = msgspec.structs.replace(one_gpu.learner, **fields)
        config = msgspec.structs.replace(one_gpu, learner=learner)
        return learner_needs(config, QWEN_HALF_B).get("averages", 0) // QWEN_HALF_B.parameters

    assert averages() == 4 and averages(anchor="ema") == 8
    assert averages(proximal="behaviour") == averages(objective="reinforce") == 0
    assert averages(proximal="behaviour", anchor="frozen") == 4


def test_what_is_offloaded_is_the_host_s(
    one_gpu: Config, monkeypatch: pytest.MonkeyPatch, tiny_model_path: Path
) -> None:
    monkeypatch.setattr(gpu_memory, "totals", lambda: [22 * GIB])
    model = msgspec.structs.replace(one_gpu.model, path=str(tiny_model_path))
    learner = msgspec.structs.replace(one_gpu.learner, offload="cpu")
    config = msgspec.structs.replace(one_gpu, model=model, learner=learner)
    assert (
        not {"optimiser, with fp32 weights", "averages"} & learner_needs(config, QWEN_HALF_B).keys()
    )
    needed, count = machine.memory_needed(config), read_model(tiny_model_path).parameters
    assert needed["its optimiser, averages and gradients (learner.offload)"] == 24 * count
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB))
    (problem,) = (each for each in machine.lacks(config) if "(learner.offload)" in each)
    both = re.search(r"about ([\d.]+) GiB are needed and 1\.00 GiB are free", problem)
    assert both and float(both[1]) == pytest.approx(sum(needed.values()) / GIB, abs=0.05)


@pytest.mark.parametrize(
    ("name", "words", "held_gib"),
    [("Qwen2.5-3B", ("learner.gradient_checkpointing=true",), 32.17), ("Qwen2.5-0.5B", (), 17.09)],
)
def test_what_an_offloaded_learner_held_on_an_h100_is_reckoned(
    name: str, words: tuple[str, ...], held_gib: float
) -> None:
    given = ["learner.micro_batch_tokens=8192", "model.max_model_len=4096", "learner.offload=cpu"]
    model = find_model(name)
    needs = learner_needs(parse("", [*given, f"model.path={name}", *words], "here"), model)
    tensors = sum(needs.values()) - needs["weights shown to actors"] - needs["CUDA"]
    assert tensors / GIB == pytest.approx(held_gib, rel=0.04), needs


def test_ranks_without_a_gpu_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(REPOSITORY / "configs" / "search_r1_7b_grpo.yaml")
    monkeypatch.setattr(gpu_memory, "totals", lambda: [80 * GIB] * 2)
    (problem,) = machine.lacks(config)
    assert problem.startswith("learner.ranks = 4 on 2 GPUs: each rank needs one of its own, so ")
    assert "with actors.count = 4 this run takes 5 (its actors share one) to 8 (each" in problem
    assert "lower learner.ranks to at most 2" in problem


def test_on_gpus_the_host_holds_no_caches_but_pinned_weights(
    one_gpu: Config, monkeypatch: pytest.MonkeyPatch, tiny_model_path: Path
) -> None:
    model = msgspec.structs.replace(one_gpu.model, path=str(tiny_model_path))
    config = msgspec.structs.replace(one_gpu, model=model)
    on_host = machine.memory_needed(config)
    monkeypatch.setattr(gpu_memory, "totals", lambda: [24 * GIB])
    beside = machine.memory_needed(config)
    caches, sent = "their keys and values (actors.kv_cache_bytes)", "weights on their way to actors"
    assert on_host[caches] == config.actors.kv_cache_bytes and caches not in beside
    assert on_host[sent] == 3 * 2 * read_model(tiny_model_path).parameters
    assert beside[sent] // 2 == 1 << (on_host[sent] // 3 - 1).bit_length()  # the publisher's alone
    gloo = msgspec.structs.replace(config.weight_sync, transport="gloo")
    apart = machine.memory_needed(msgspec.structs.replace(config, weight_sync=gloo))
    assert apart[sent] // 3 == beside[sent] // 2


@pytest.mark.parametrize(
    ("ranks", "gpus", "workers", "homes"),
    [
        (1, 1, 1, [[0], [0], [0]]),
        (1, 2, 1, [[1], [1], [1]]),
        (1, 4, 1, [[1], [2], [3]]),
        (2, 4, 1, [[2], [3], [2]]),
        (4, 2, 1, [[0], [1], [0]]),
        (4, 8, 2, [[4, 5], [6, 7], [4, 5]]),
        (1, 4, 2, [[1, 2], [1, 2], [1, 2]]),
        (1, 2, 2, [[0, 1], [0, 1], [0, 1]]),  # the learner's too: it leaves too few
        (3, 4, 2, [[0, 1], [2, 3], [0, 1]]),
    ],
)
def test_actors_take_the_gpus_that_the_learner_leaves(
    ranks: int, gpus: int, workers: int, homes: list[list[int]]
) -> None:
    assert [[*gpus_of_actor(index, ranks, gpus, workers)] for index in range(3)] == homes


def test_workers_of_an_engine_share_its_weights_and_its_cache_out(tiny_model_path: Path) -> None:
    """But each receives whole versions, through the host's memory."""
    said = ["defaults=gpus", "actors.count=1", "learner.ranks=2", f"model.path={tiny_model_path}"]
    alone = load(REPOSITORY / "configs" / "base.yaml", said)
    config = load(REPOSITORY / "configs" / "base.yaml", [*said, "actors.tensor_parallel=2"])
    share, whole = engine_needs(config, QWEN_7B), engine_needs(alone, QWEN_7B)
    for what in ("weights", "keys and values"):
        assert share[what] == whole[what] // 2
    largest = 2 * max(QWEN_7B.weights)
    assert (share["weights received"], whole["weights received"]) == (
        largest,
        2 * QWEN_7B.parameters,
    )
    lines = [line for line, _ in plan(config, QWEN_7B, [80 * GIB] * 4)]
    assert [re.findall(r"(learner rank \d|actor-\d worker \d)", line) for line in lines] == [
        ["learner rank 0"], ["learner rank 1"], ["actor-0 worker 0"], ["actor-0 worker 1"],
    ]  # fmt: skip
    of_one, of_two = (machine.memory_needed(each, 4) for each in (alone, config))
    sent = "weights on their way to actors"
    assert of_two[sent] == 2 * of_one[sent]


@pytest.mark.parametrize(
    ("files", "settings", "counted"),
    [
        (["index.faiss"], [], 1000),
        (["part_aa", "part_ab"], [], 2000),
        (["index.faiss"], ["retrieval.map_index=true"], 0),
        (["index.faiss"], ["retrieval.url=http://127.0.0.1:1"], 0),
        (["bm25"], [], 0),  # it stays in its file
        ([], ["retrieval.index_device=cuda"], gpu_memory.WIKI_18_BYTES),
    ],
)
def test_vectors_that_are_searched_count_as_memory(
    tmp_path: Path, files: list[str], settings: list[str], counted: int
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(bytes(1000))
    said = [f"retrieval.index={tmp_path}", *settings]
    config = load(REPOSITORY / "configs" / "base.yaml", said)
    assert gpu_memory.vector_bytes(config) == counted
    needs = machine.memory_needed(config, 0, QWEN_HALF_B)
    assert sum(size for what, size in needs.items() if what.startswith("vectors")) == counted


def test_fewer_gpus_than_workers_of_an_engine_are_refused(monkeypatch) -> None:
    said = ["actors.count=2", "learner.ranks=1", "actors.tensor_parallel=4"]
    config = load(REPOSITORY / "configs" / "base.yaml", said)
    monkeypatch.setattr(gpu_memory, "totals", lambda: [80 * GIB] * 2)
    (problem,) = machine.lacks(config)
    assert problem == (
        "actors.tensor_parallel = 4 on 2 GPUs: each worker of an engine needs one of its own, so "
        "that with learner.ranks = 1 and actors.count = 2 this run takes 5 (its actors share 4) to "
        "9 (each has its own): lower actors.tensor_parallel to at most 2, or see "
        "CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("one_gpu", [], "for 1: weight_sync.transport = 'cuda_ipc': on a machine"),
        (
            "base",
            ["weight_sync.transport=nccl", "actors.count=2"],
            "for 3 (learner.ranks = 1, actors.count = 2): we",
        ),
        (
            "base",
            ["weight_sync.transport=nccl", "actors.count=2", "actors.tensor_parallel=4"],
            "for 9 (learner.ranks = 1, actors.count = 2, actors.tensor_parallel = 4): we",
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


def test_an_installation_for_gpus_whose_driver_cannot_be_used_is_refused_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "on_cpu", lambda: False)
    monkeypatch.setattr(gpu_memory, "totals", list)
    said = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update it"

    def init() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "init", init)
    (problem,) = machine.lacks(load(REPOSITORY / "configs" / "base.yaml"))
    cause = "none can be used: The NVIDIA driver on your system is too old (found version 12020): "
    assert cause in problem and problem.endswith("make .venv, and use .venv/bin/forage")


def test_what_is_for_gpus_is_told_nothing_where_they_are(
    one_gpu: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "totals", lambda: [24 * GIB])
    assert machine.missing_gpus(one_gpu) == ""
    two = msgspec.structs.replace(one_gpu, actors=ActorsConfig(count=2))
    monkeypatch.setattr(gpu_memory, "totals", lambda: [24 * GIB] * 3)
    (problem,) = [each for each in machine.lacks(two) if "transport" in each]
    assert problem.startswith("weight_sync.transport = 'cuda_ipc' needs every model on one GPU")


WAYS = [(0, 1, "gloo"), (1, 1, "cuda_ipc"), (2, 1, "gloo"), (3, 1, "nccl")]
WAYS += [(0, 2, "gloo"), (3, 2, "gloo"), (5, 2, "nccl")]


@pytest.mark.parametrize(("gpus", "workers", "way"), WAYS)
def test_how_weights_will_travel_is_said_before(
    gpus: int, workers: int, way: str, monkeypatch
) -> None:
    monkeypatch.setattr(gpu_memory, "totals", lambda: [GIB] * gpus)
    said = ["actors.count=2", f"actors.tensor_parallel={workers}"]
    config = load(REPOSITORY / "configs" / "base.yaml", said)
    assert machine.transport(config) == way


@pytest.mark.parametrize(("kind", "of_token"), [("auto", 1536), ("fp8", 384)])
def test_a_quantised_cache_holds_more_tokens(
    tiny_model_path: Path, kind: str, of_token: int
) -> None:
    asked = [
        f"model.path={tiny_model_path}",
        "model.dtype=float32",
        f"actors.kv_cache_bytes={128 << 20}",
        f"actors.engine.kv_cache_dtype={kind}",
    ]
    config = load(REPOSITORY / "configs" / "one_gpu.yaml", asked)
    pace = Pace(config, read_model(tiny_model_path), 24 * GIB, 1)
    assert pace.kv_tokens == (128 << 20) // of_token

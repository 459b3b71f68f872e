"""What a configuration leaves to be found fits the model and the GPUs that it is found for."""

import importlib
from pathlib import Path

import pytest

from actors.policies.engine import engine_arguments, prepare_environment
from configs.devices import on_cpu
from configs.load import load
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts import cli
from scripts.setup import fit, gpu_memory
from scripts.setup.fit import fitted
from scripts.setup.gpu_memory import GIB, HEADROOM, plan, tenants
from scripts.setup.model_size import contexts_bytes, find_model, known_model
from scripts.setup.preflight import checked

BASE = REPOSITORY / "configs" / "base.yaml"
BLOCK = 128 if on_cpu() else 16  # tokens of keys and values
FREE_OF_80 = int(79.1 * GIB)  # an A100's or H100's of 80 GB
FREE_OF_24 = 22 * GIB  # an L4's or A10G's of 24 GB


def held(config: Config, gpus: list[int], name: str) -> list[int]:
    found = tenants(config, find_model(name), len(gpus))
    return [sum(sum(needs.values()) for needs in each.values()) for each in found]


@pytest.mark.parametrize(
    ("name", "gpus", "offload"),
    [
        ("Qwen2.5-0.5B", [FREE_OF_24], "none"),
        ("Qwen2.5-0.5B", [FREE_OF_24] * 2, "none"),
        ("Qwen2.5-1.5B", [FREE_OF_80], "none"),
        ("Qwen2.5-3B", [FREE_OF_80], "cpu"),
        ("Qwen2.5-3B", [FREE_OF_80] * 8, "none"),
        ("Qwen2.5-7B", [FREE_OF_80] * 8, "none"),
        ("Qwen2.5-14B", [FREE_OF_80] * 8, "cpu"),
    ],
)
def test_the_defaults_fill_the_gpus_and_no_more(name: str, gpus: list[int], offload: str) -> None:
    config, model = load(BASE, gpus=len(gpus)), find_model(name)
    found = fitted(config, gpus, model)
    assert found.learner.offload == offload
    most = gpus[0] * (1 - HEADROOM)
    sums = held(found, gpus, name)
    assert all(size <= most for size in sums) and sum(sums) / len(gpus) > 0.6 * most
    assert sums[-1] == pytest.approx(most, rel=0.001)  # an actor's: keys and values take the rest
    assert found.actors.kv_cache_bytes >= fit.least_cache_bytes(config, model)


def test_seven_billion_are_refused_on_24_gib_with_what_each_part_needs() -> None:
    found = fitted(load(BASE, gpus=1), [FREE_OF_24], find_model("Qwen2.5-7B"))
    one = (4096 + BLOCK) * 56 * 1024  # one context, and the block that vLLM keeps
    assert found.actors.kv_cache_bytes == one  # less is no use
    ((line, fits),) = plan(found, find_model("Qwen2.5-7B"), [FREE_OF_24])
    assert not fits and "of 22.0 GiB: learner rank 0" in line and "weights received" in line


def test_a_contexts_copies_are_held_where_workers_are_more_than_heads() -> None:
    few, many = (
        fit.least_cache_bytes(
            load(BASE, [f"actors.tensor_parallel={workers}"], gpus=8), find_model("Qwen2.5-3B")
        )
        for workers in (2, 8)
    )
    assert many == 4 * few  # of two heads of keys and values


def test_given_numbers_stay() -> None:
    given = load(BASE, ["actors.kv_cache_bytes=1000", "learner.offload=none"], gpus=8)
    assert fitted(given, [FREE_OF_80] * 8, find_model("Qwen2.5-14B")) == given


def test_a_given_cache_is_made_room_for() -> None:
    words = ["learner.offload=auto", f"actors.kv_cache_bytes={8 * GIB}"]
    config = load(BASE, words, gpus=1)
    assert fitted(config, [FREE_OF_24], find_model("Qwen2.5-0.5B")).learner.offload == "cpu"


@pytest.mark.parametrize("most", [True, False])
def test_without_gpus_the_seats_contexts_are_held(most: bool) -> None:
    config = load(BASE, ["learner.offload=auto"], gpus=0)
    model = find_model("Qwen2.5-7B" if most else "Qwen2.5-0.5B")
    fitting = fitted(config, [], model)
    found = fitting.actors.kv_cache_bytes
    assert fitting.learner.offload == "none"
    filled = (config.actors.max_num_seqs * config.model.max_model_len + BLOCK) * 2 * model.kept
    assert found == min(filled, 4 * GIB) and (filled > 4 * GIB) == (most and filled > found)


def test_an_engine_alone_has_the_gpu_to_itself(tiny_model_path: Path) -> None:
    config = load(BASE, [f"model.path={tiny_model_path}"], gpus=1)
    gpus, cache = [FREE_OF_24, GIB], config.actors.kv_cache_bytes
    alone = fit.fitted_alone(config, gpus)
    needed = sum(gpu_memory.engine_needs(alone, known_model(tiny_model_path)).values())
    assert cache == 0 and needed == int(FREE_OF_24 * (1 - HEADROOM))
    assert fit.fitted_alone(alone, []) == alone
    assert 0 < fit.fitted_alone(config, []).actors.kv_cache_bytes <= 4 * GIB


def test_vectors_on_the_gpus_are_left_room(tmp_path: Path) -> None:
    (tmp_path / "index.faiss").write_bytes(b"")
    words = [f"retrieval.index={tmp_path / 'index.faiss'}", "retrieval.index_device=cuda"]
    model, gpus = find_model("Qwen2.5-3B"), [FREE_OF_80] * 8

    def cache(*overrides: str) -> int:
        config = load(BASE, overrides, gpus=8)
        return fitted(config, gpus, model).actors.kv_cache_bytes

    small, large = cache(*words), cache("retrieval.index=none", words[1])
    assert cache() - small == gpu_memory.FAISS_BYTES + gpu_memory.CONTEXT_BYTES
    assert small - large == gpu_memory.WIKI_18_BYTES // 2 // 8
    on_first = gpu_memory.retrieval_needs(load(BASE, ["retrieval.device=cuda"], gpus=8), 0, 8)
    assert "encoder" in on_first


def test_a_prepared_run_has_numbers(tiny_model_path: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "answers": ["me"]}\n')
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "Title\\ntext"}\n')
    words = {
        "model.path": tiny_model_path,
        "model.max_model_len": 512,
        "questions.train": tmp_path / "q.jsonl",
        "questions.eval": tmp_path / "q.jsonl",
        "retrieval.corpus": tmp_path / "c.jsonl",
        "run_dir": tmp_path / "run",
    }
    monkeypatch.setattr(gpu_memory, "totals", list)
    config = checked(str(BASE), [f"{field}={value}" for field, value in words.items()], here=False)
    assert config.actors.kv_cache_bytes > 0 and config.learner.offload == "none"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_an_engine_starts_with_what_was_found(spelling_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "answers": ["me"]}\n' * 2)
    words = {
        "model.path": spelling_model_path,
        "model.max_model_len": 512,
        "questions.train": tmp_path / "q.jsonl",
        "questions.eval": tmp_path / "q.jsonl",
        "questions.prompt": "{question}",
        "environment.name": "no_search",
        "learner.total_steps": 0,
        "learner.offload": "auto",
        "run_dir": tmp_path / "run",
    }
    overrides = [f"{field}={value}" for field, value in words.items()]
    assert cli.main(["sync", str(BASE), *overrides]) == 0
    recorded = load(tmp_path / "run" / "config.yaml")
    filled = fit.fitted(load(BASE, overrides)).actors.kv_cache_bytes
    assert recorded.actors.kv_cache_bytes == filled > 0
    assert recorded.learner.offload == "none"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("length", [256, 300, 512])
def test_a_context_needs_what_vllm_says(tiny_model_path: Path, length: int) -> None:
    words = [f"model.path={tiny_model_path}", f"model.max_model_len={length}"]
    config, model = load(BASE, words, gpus=0), known_model(tiny_model_path)
    prepare_environment(config)
    torch = importlib.import_module("torch")
    arguments = importlib.import_module("vllm.engine.arg_utils")
    kept = importlib.import_module("vllm.v1.core.kv_cache_utils")
    specs = importlib.import_module("vllm.v1.kv_cache_interface")
    of_vllm = arguments.AsyncEngineArgs(**engine_arguments(config, "")).create_engine_config()
    of_vllm.cache_config.kv_cache_layout = "LBHNC"  # a CPU's; an engine asks its workers
    spec = specs.FullAttentionSpec(
        block_size=of_vllm.cache_config.block_size,
        num_kv_heads=model.key_heads,
        head_size=model.keys // model.key_heads,
        dtype=getattr(torch, config.engine_dtype),
    )
    layers = {f"layer {number}": spec for number in range(model.layers)}
    least = contexts_bytes(config, model)
    kept.check_enough_kv_cache_memory(of_vllm, layers, least)
    with pytest.raises(ValueError, match="at least one request"):
        kept.check_enough_kv_cache_memory(of_vllm, layers, least - 1)

"""A LoRA adapter inside a real vLLM engine: it computes what the merged model computes, and each
way in which it is not there, or not all of it, is told by name.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from configs.schema import ActorsConfig, Config, ModelConfig, WeightSyncConfig
from tests.weight_sync.test_vllm import check_logprobs, hf_logprobs, some_tokens
from weight_sync.adapter import names_of
from weight_sync.protocol import Adapter, ManifestMismatch, VerificationFailed, require_done
from weight_sync.publisher import Publisher
from weight_sync.subscriber import Subscriber

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]
FAULTY = "tests.weight_sync.faulty_adapter_worker.FaultyAdapterWorker"
ADAPTER = Adapter(rank=4, alpha=12.0, layers=("q_proj", "v_proj", "o_proj", "up_proj"))
DEADLINE_S = 60.0
SYNC = WeightSyncConfig(probe_tolerance=1e-4, bucket_bytes=20_000, publish_deadline_s=DEADLINE_S)
ENDLESS = {"ignore_eos": True, "detokenize": False}
Tensors = dict[str, torch.Tensor]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(spoken_model_path: Path) -> AsyncIterator[Any]:
    """An engine of its own, started to compute the adapter."""
    from actors.policies.vllm import VllmPolicy

    config = Config(
        model=ModelConfig(path=str(spoken_model_path), dtype="float32", max_model_len=256),
        actors=ActorsConfig(max_num_seqs=16, kv_cache_bytes=64 << 20),
    )
    started = await VllmPolicy.start(config, worker_extension=FAULTY, adapter=ADAPTER)
    yield started.engine
    started.close()


@pytest.fixture
def policy(engine: Any) -> Any:
    """Its completions do not stop before `max_tokens`."""
    from actors.policies.vllm import VllmPolicy

    return VllmPolicy(engine, lambda _: ENDLESS, adapter=ADAPTER)


@pytest.fixture(scope="module")
def make(spoken_model_path: Path) -> Callable[[int], tuple[Tensors, torch.nn.Module]]:
    """make(seed): an adapter as PEFT saves it, and the model with it added; seed 0 has B = 0."""
    from transformers import AutoModelForCausalLM

    def made(seed: int) -> tuple[Tensors, torch.nn.Module]:
        model = AutoModelForCausalLM.from_pretrained(spoken_model_path, dtype=torch.float32).eval()
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for name, layer in model.named_modules():
            if name.rpartition(".")[2] in ADAPTER.layers:
                rows, columns = layer.weight.shape
                a = torch.randn(ADAPTER.rank, columns, generator=generator) / columns**0.5
                b = torch.randn(rows, ADAPTER.rank, generator=generator) * (0.1 if seed else 0.0)
                tensors |= dict(zip(names_of(name), (a, b), strict=True))
                layer.weight.data += ADAPTER.alpha / ADAPTER.rank * b @ a
        return tensors, model

    return made


@contextlib.asynccontextmanager
async def following(policy: Any, folder: Path, adapter: Adapter = ADAPTER) -> AsyncIterator[Any]:
    """A publisher that the engine follows."""
    endpoint = f"ipc://{folder}/weights"
    task = asyncio.create_task(Subscriber("actor-0", endpoint, policy, SYNC).run())
    try:
        with Publisher(SYNC, 1, 0, endpoint, adapter=adapter) as publisher:
            yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def update(
    publisher: Publisher, version: int, tensors: Tensors, model: torch.nn.Module
) -> None:
    probe = some_tokens(model, 64, 99)
    publisher.publish(version, tensors.items(), probe, hf_logprobs(model, probe).tolist())
    await asyncio.to_thread(publisher.wait_applied, version, DEADLINE_S)


async def test_updates_under_load(policy: Any, make: Any, tmp_path: Path) -> None:
    """Every token is its version's own: that of an adapter that was added to the base by hand."""
    made = {version: make(version) for version in range(16)}
    models = {version: model for version, (_, model) in made.items()}
    prompts = [some_tokens(models[0], 8 + i, i) for i in range(12)]
    async with following(policy, tmp_path) as publisher:
        await update(publisher, 0, *made[0])
        for first in (1, 6, 11):  # where this process stands still, all may end between two
            asked = (
                policy.complete(p, temperature=1.0, seed=i, max_tokens=120, stops=())
                for i, p in enumerate(prompts)
            )
            completions = asyncio.gather(*asked)
            for version in range(first, first + 5):
                await policy.complete(prompts[0], temperature=1.0, seed=99, max_tokens=12, stops=())
                await update(publisher, version, *made[version])
            done = await asyncio.wait_for(completions, DEADLINE_S)
            for prompt, completion in zip(prompts, done, strict=True):
                assert (np.diff(completion.versions) >= 0).all()
                check_logprobs(models, prompt, completion)
            if several := sum(len(set(each.versions)) > 2 for each in done) > 6:
                break
        assert publisher.gauges()["sync/refits"] == 0.0
    assert several


FAULTS = {
    "not delivered": r"does not hold the adapter that has arrived: \d+ of 24 tensors differ",
    "stale": r"does not hold the adapter that has arrived: \d+ of 24 tensors differ",
    "delivered to the base": r"does not hold the adapter that has arrived: \d+ of 24 tensors",
    "delivered to the base too": r"base under the adapter .*: 1 of 16 weights have changed: "
    r"model.layers.1.self_attn.qkv_proj",
    "one layer missing": r": 2 of 24 tensors differ: base_model.model.model.layers.1.self_attn."
    r"q_proj.lora_A.weight, .*q_proj.lora_B.weight \(actor-0, version 1\)",
    "another alpha": r"8 of 24 tensors differ: base_model\S+lora_B.weight",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_told_by_what_the_engine_holds(
    policy: Any, make: Any, tmp_path: Path, fault: str
) -> None:
    """The probe sees none of it: what is learnt in a version is less than its tolerance."""
    blind = msgspec.structs.replace(SYNC, probe_tolerance=100.0)
    endpoint = f"ipc://{tmp_path}/weights"
    task = asyncio.create_task(Subscriber("actor-0", endpoint, policy, blind).run())
    with Publisher(blind, 1, 0, endpoint, adapter=ADAPTER) as publisher:
        await update(publisher, 0, *make(1))
        await policy.call_workers("plant", fault)
        try:
            with pytest.raises(VerificationFailed, match=FAULTS[fault]):
                await update(publisher, 1, *make(2))
        finally:
            await policy.call_workers("plant", "")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_requests_that_do_not_name_the_adapter_are_told(
    engine: Any, make: Any, tmp_path: Path
) -> None:
    """B is 0, so that the probe sees no difference."""
    from actors.policies.vllm import VllmPolicy

    bare = VllmPolicy(engine, lambda _: ENDLESS)
    async with following(bare, tmp_path) as publisher:
        with pytest.raises(VerificationFailed, match="computed by the base: they did not name"):
            await update(publisher, 0, *make(0))


async def test_what_the_learner_says_of_its_adapter_must_be_the_engine_s(
    policy: Any, make: Any, tmp_path: Path
) -> None:
    tensors, model = make(1)
    other = Adapter(rank=4, alpha=16.0, layers=ADAPTER.layers)
    async with following(policy, tmp_path, other) as publisher:
        with pytest.raises(ManifestMismatch, match=r"lora.alpha: learner 16.0, actor 12.0"):
            await update(publisher, 0, tensors, model)
    del tensors[names_of("model.layers.0.self_attn.v_proj")[1]]
    async with following(policy, tmp_path) as publisher:
        missing = r"layers.0.self_attn.v_proj.lora_B.weight': learner has none, actor float32"
        with pytest.raises(ManifestMismatch, match=missing):
            await update(publisher, 0, tensors, model)


async def test_the_probe_sees_an_adapter_of_another_scale(
    policy: Any, make: Any, tmp_path: Path
) -> None:
    """The learner computes with another scale than it says."""
    _, model = make(1)
    async with following(policy, tmp_path) as publisher:
        doubled = {n: t * 2 if "lora_B" in n else t for n, t in make(1)[0].items()}
        with pytest.raises(VerificationFailed, match="log-probs are not the learner's"):
            await update(publisher, 0, doubled, model)


async def test_snapshots(policy: Any, make: Any, tmp_path: Path) -> None:
    for seed in (3, 4):
        tensors, model = make(seed)
        path = tmp_path / "adapter.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        await policy.pause()
        require_done(await policy.call_workers("load_snapshot", str(path), seed))
        await policy.resume()
        await policy.set_policy_version(seed)
        tokens = some_tokens(model, 64, 0)
        assert np.abs((await policy.score(tokens))[0] - hf_logprobs(model, tokens)).max() <= 1e-4

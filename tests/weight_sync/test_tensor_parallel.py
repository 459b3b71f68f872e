"""An engine of two workers beside one of one: both follow one learner and compute the same."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from actors.errors import EngineDead
from actors.policies.vllm import VllmPolicy
from configs.runtime.process import REPOSITORY
from configs.schema import ActorsConfig, Config, ModelConfig, WeightSyncConfig
from tests.children import ends_with_us
from weight_sync.protocol import VerificationFailed
from weight_sync.publisher import Publisher
from weight_sync.subscriber import Subscriber

TOLERANCE = 1e-4
VERSIONS = 20
DEADLINE_S = 300.0
SYNC = WeightSyncConfig(
    probe_tolerance=TOLERANCE,
    bucket_bytes=200_000,
    join_deadline_s=DEADLINE_S,
    publish_deadline_s=60.0,
)
WORKERS = {"actor-0": 1, "actor-1": 2}
STALE = "tests.weight_sync.stale_worker.StaleWorker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, word_tokenizer: Any) -> Path:
    """A random model with grouped queries: two heads of keys and values, one for each worker."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("grouped") / "model"
    config = Qwen3Config(
        vocab_size=len(word_tokenizer),
        hidden_size=128,
        head_dim=32,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=word_tokenizer.eos_token_id,
        pad_token_id=word_tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    word_tokenizer.save_pretrained(path)
    return path


def version_of(folder: Path, seed: int) -> torch.nn.Module:
    """The same architecture with other weights, as a learner would hold it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(0.8).add_(noise, alpha=0.1)
    return model


@torch.no_grad()
def logprobs(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


@contextlib.asynccontextmanager
async def engines(folder: Path, endpoint: str) -> AsyncIterator[dict[str, VllmPolicy]]:
    """An engine for each of WORKERS, each followed by its subscriber."""
    started: dict[str, VllmPolicy] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, workers in WORKERS.items():
            config = Config(
                model=ModelConfig(path=str(folder), dtype="float32", max_model_len=128),
                actors=ActorsConfig(
                    tensor_parallel=workers, kv_cache_bytes=64 << 20, max_num_seqs=4
                ),
            )
            started[name] = await VllmPolicy.start(config, worker_extension=STALE)
            stack.callback(started[name].close)
        async with asyncio.TaskGroup() as tasks:
            following = [
                tasks.create_task(Subscriber(name, endpoint, policy, SYNC).run())
                for name, policy in started.items()
            ]
            yield started
            for each in following:
                each.cancel()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.soak("tensor_parallel")
@pytest.mark.timeout(900)
async def test_two_workers_serve_what_one_does_and_a_stale_shard_is_caught(
    folder: Path, tmp_path: Path, word_tokenizer: Any
) -> None:
    endpoint = f"ipc://{tmp_path}/weights"
    drawn = torch.Generator().manual_seed(1)
    probe = torch.randint(3, len(word_tokenizer), (48,), generator=drawn).tolist()
    apart = []
    async with engines(folder, endpoint) as started:
        one, two = started.values()
        with Publisher(SYNC, len(started), 0, endpoint) as publisher:

            async def publish(version: int) -> None:
                model = version_of(folder, version)
                publisher.publish(version, model.named_parameters(), probe, logprobs(model, probe))
                await asyncio.to_thread(publisher.wait_applied, version, DEADLINE_S)

            for version in range(VERSIONS + 1):
                await publish(version)
                of_one, of_two = [await each.score(probe[::-1]) for each in (one, two)]
                assert (of_one[1], of_two[1]) == (version, version)
                apart.append(float(np.abs(of_one[0] - of_two[0]).max()))
            print(f"two workers from one over {VERSIONS} versions: {max(apart):.2g} nats at most")
            assert max(apart) <= TOLERANCE
            assert publisher.gauges()["sync/refits"] == 0
            sampled = await two.complete(
                probe[:8], temperature=1.0, seed=3, max_tokens=16, stops=()
            )
            text = [*probe[:8], *sampled.tokens.tolist()]
            of_one, _ = await one.score(text)
            assert np.abs(of_one[7:] - sampled.logprobs).max() <= TOLERANCE
            await two.call_workers("leave_stale", 1, "model.layers.1.mlp.down_proj.weight")
            with pytest.raises(VerificationFailed, match=r"not the learner's.*actor-1"):
                await publish(VERSIONS + 1)
            worker_of(os.getpid(), 1).kill()
            with pytest.raises(EngineDead):
                await asyncio.wait_for(two.watch(), 60)


def worker_of(pid: int, rank: int) -> psutil.Process:
    """An engine's worker below a process, by the title that vLLM gives it."""
    below = psutil.Process(pid).children(recursive=True)
    (found,) = [each for each in below if f"Worker_TP{rank}" in "".join(each.cmdline())]
    return found


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.soak("tensor_parallel")
@pytest.mark.timeout(900)
def test_no_worker_outlives_a_killed_actor(folder: Path, tmp_path: Path) -> None:
    endpoint, model = f"ipc://{tmp_path}/weights", version_of(folder, 0)
    probe, script = list(range(3, 19)), Path(__file__).with_name("vllm_actor.py")
    environment = ends_with_us(PYTHONPATH=str(REPOSITORY))
    command = [sys.executable, str(script), "actor-0", endpoint, str(folder), "2"]
    actor = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        with Publisher(SYNC, 1, 0, endpoint) as publisher:
            publisher.wait_for_actors(DEADLINE_S)
            publisher.publish(0, model.named_parameters(), probe, logprobs(model, probe))
            publisher.wait_applied(0, DEADLINE_S)
        below = psutil.Process(actor.pid).children(recursive=True)
        assert {worker_of(actor.pid, 0), worker_of(actor.pid, 1)} <= {*below}
    finally:
        actor.kill()
        actor.wait()
    _, left = psutil.wait_procs(below, 30)
    assert not left

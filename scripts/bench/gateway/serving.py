"""The two servers of the benchmark, each a process of its own on the same model.

`python -m scripts.bench.gateway.serving CONFIG FILE SESSIONS [a.b=c …]` is ours: an engine as an
actor starts it and a gateway, whose URL and keys go to FILE. The other is vLLM's, with the
arguments that our engine has, as far as its command line takes them.
"""

import asyncio
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from actors.gateway.server import HOST, Gateway
from actors.policies.engine import prepare_environment
from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter, load_tokenizer
from configs.load import load
from configs.runtime.files import write_durably
from configs.runtime.process import begin, loop_factory
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, Sampling

_NOBODY = Question("bench", "", ())


class Address(msgspec.Struct, frozen=True):
    """Where a server listens, and the key of each of its sessions."""

    url: str
    keys: list[str]


def command_of_vllm(config: Config, port: int) -> list[str]:
    """The words after `python` that start vLLM's own server with our engine's settings."""
    actors, model = config.actors, config.model
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(port)),
        *("--model", model.path, "--served-model-name", "policy"),
        *("--dtype", config.engine_dtype, "--max-model-len", str(model.max_model_len)),
        *("--max-num-seqs", str(actors.max_num_seqs), "--max-num-batched-tokens", "8192"),
        *("--kv-cache-memory-bytes", str(actors.kv_cache_bytes), "--block-size", "32"),
        *("--enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--disable-log-stats", "--disable-uvicorn-access-log"),
    ]


async def _serve(config: Config, file: Path, sessions: int) -> None:
    tokenizer = load_tokenizer(config.model.path)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    policy = await VllmPolicy.start(config)
    try:
        await policy.set_policy_version(0)
        gateway = await Gateway.start(policy, prompter, config, _as_loaded)
        leases = (Lease(0, n, "train", _NOBODY, Sampling()) for n in range(sessions))
        keys = [gateway.open(lease, free=True).key for lease in leases]
        address = Address(gateway.url, keys)
        write_durably(file, msgspec.json.encode(address))
        await policy.watch()
    finally:
        policy.close()


async def _as_loaded(versions: Collection[int]) -> None:
    """Take the model's own weights for verified."""


def main(words: Sequence[str]) -> None:
    """Serve until the caller ends this process."""
    path, file, sessions, *overrides = words
    begin("gateway")
    config = load(path, overrides)
    prepare_environment(config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(config, Path(file), int(sessions)))


if __name__ == "__main__":
    main(sys.argv[1:])

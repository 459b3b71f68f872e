"""vLLM's own scheduler and cache manager in simulated time, without a model.

Requests are queued, scheduled, preempted, evicted and answered by vLLM's code. The forward pass
alone is left out, for its time: the longer of `least_step_s` and `step_s + token_s * tokens`. So
ways to schedule one load are compared, and no seconds of a GPU are told.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from actors.policies.engine import FREE_BLOCKS
from actors.policies.statistics import EngineStatistics

BLOCK_TOKENS = 16
SAMPLED = 7  # every token that is sampled
# Any model: of its folder only the configuration is read.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
Answered = Callable[[list[int]], None]  # told prompt and completion


@dataclass(frozen=True)
class Machine:
    """An engine's sizes, and the seconds of its forward pass; by default an eighth of the one that
    `configs/search_r1_7b_grpo.yaml` has, whose steps take as long.
    """

    seats: int = 256 // 8
    kv_tokens: int = 749_000 // 8
    batch_tokens: int = 8192 // 8
    max_model_len: int = 4596
    least_step_s: float = 0.012
    step_s: float = 0.010
    token_s: float = 8 * 3.0e-5


class SimulatedEngine:
    """An engine on a clock of its own, `now_s`. `by_priority`: as our actors start vLLM, else as it
    comes, first come, first served.
    """

    def __init__(self, machine: Machine, by_priority: bool) -> None:
        self.machine, self.by_priority, self.now_s = machine, by_priority, 0.0
        self.statistics = EngineStatistics()
        self.statistics.kv_tokens = machine.kv_tokens
        self._scheduler = _scheduler(machine, by_priority)
        init_none_hash(_hash)
        self._blocks = get_request_block_hasher(BLOCK_TOKENS, _hash)
        self._answered: dict[str, Answered] = {}
        self._added = 0

    def add(
        self, tokens: Sequence[int], max_tokens: int, priority: int, answered: Answered
    ) -> None:
        """Queue a request that samples `max_tokens`."""
        self._added += 1
        request = Request(
            request_id=f"{self._added:09d}",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=self.now_s,
            block_hasher=self._blocks,
            priority=priority if self.by_priority else 0,
        )
        self._answered[request.request_id] = answered
        self._scheduler.add_request(request)

    def step(self) -> None:
        """Schedule a batch, let its seconds pass, and answer what is finished."""
        batch, machine = self._scheduler.schedule(), self.machine
        tokens = batch.total_num_scheduled_tokens
        self.now_s += max(machine.least_step_s, machine.step_s + tokens * machine.token_s)
        requests = [self._scheduler.requests[name] for name in batch.num_scheduled_tokens]
        made = ModelRunnerOutput(
            req_ids=[each.request_id for each in requests],
            req_id_to_index={each.request_id: n for n, each in enumerate(requests)},
            sampled_token_ids=[
                [SAMPLED] if each.num_computed_tokens >= each.num_tokens else []
                for each in requests
            ],
        )
        for outputs in self._scheduler.update_from_output(batch, made).values():
            events = SimpleNamespace(num_preempted_reqs=_preemptions(outputs))
            self.statistics.record(outputs.scheduler_stats, events)
        for each in requests:
            if each.is_finished():
                self._answered.pop(each.request_id)(list(each.all_token_ids))

    def update(self) -> None:
        """Drop all caches, as new weights do: what runs is preempted."""
        self._scheduler.reset_prefix_cache(reset_running_requests=True)
        self.statistics.updated()


def _preemptions(outputs: Any) -> int:
    events = (event for each in outputs.outputs for event in each.events or ())
    return sum(event.type == EngineCoreEventType.PREEMPTED for event in events)


def _hash(value: Any) -> bytes:
    return (hash(value) & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")


def _scheduler(machine: Machine, by_priority: bool) -> Scheduler:
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it advises on engines for a CPU
    config = _config(machine, by_priority)
    blocks = machine.kv_tokens // BLOCK_TOKENS
    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def _config(machine: Machine, by_priority: bool) -> VllmConfig:
    with TemporaryDirectory(prefix="forage-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder,
            dtype="float32",
            max_model_len=machine.max_model_len,
            skip_tokenizer_init=True,
        )
    return VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_model_len=machine.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=machine.seats,
            max_num_batched_tokens=machine.batch_tokens,
            enable_chunked_prefill=True,
            async_scheduling=False,
            policy="priority" if by_priority else "fcfs",
            watermark=FREE_BLOCKS if by_priority else 0.0,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )

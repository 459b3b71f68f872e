"""Updates under load, for `forage bench weight-sync`: a real vLLM engine, 32 requests always in
flight, and version after version of the demo's model.

Every wait has a deadline.
"""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.errors import PolicyError
from actors.policies.base import Completion
from actors.policies.vllm import VllmPolicy
from configs.schema import ActorsConfig, Config, ModelConfig, WeightSyncConfig
from scripts.bench.harness import START_S, Report
from weight_sync.protocol import WeightSyncError
from weight_sync.publisher import Publisher
from weight_sync.subscriber import Subscriber

IN_FLIGHT, TOKENS, PROBE_TOKENS, CHECKED = 32, 48, 64, 24
UPDATE_S = 60.0
SYNC = WeightSyncConfig(probe_tolerance=1e-4, join_deadline_s=START_S)
Done = tuple[list[int], Completion]


class Learner:
    """The model at version v: the folder's weights, and a little noise that v alone determines."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self._held = [p.clone() for p in self.model.parameters()]
        self.probe = self.tokens(PROBE_TOKENS, 0)

    def tokens(self, count: int, seed: int) -> list[int]:
        """Some tokens of its vocabulary."""
        chance = random.Random(seed)
        return [chance.randrange(3, self.model.config.vocab_size) for _ in range(count)]

    def at(self, version: int) -> None:
        """Hold the weights of this version."""
        noise = torch.Generator().manual_seed(version)
        for parameter, held in zip(self.model.parameters(), self._held, strict=True):
            parameter.copy_(held).add_(torch.randn(held.shape, generator=noise), alpha=1e-3)

    def logprobs(self, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32[n - 1] of tokens[1:]."""
        scores = self.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        found: np.ndarray[Any, np.dtype[np.float32]] = scores.gather(
            1, torch.tensor(tokens[1:])[:, None]
        )[:, 0].numpy()
        return found


class Load:
    """Requests, always as many in flight; `lost` counts those that ended in an error."""

    def __init__(self, policy: VllmPolicy, learner: Learner) -> None:
        self.done: list[Done] = []
        self.lost = 0
        self._policy, self._learner, self._numbers = policy, learner, itertools.count()

    async def keep_asking(self) -> None:
        """Send one request after the other, for ever."""
        while True:
            number = next(self._numbers)
            prompt = self._learner.tokens(8 + number % 24, number)
            try:
                completion = await self._policy.complete(
                    prompt, temperature=1.0, seed=number, max_tokens=TOKENS, stops=()
                )
            except PolicyError:
                self.lost += 1
                await asyncio.sleep(0.1)
            else:
                self.lost += len(completion.tokens) != TOKENS
                self.done.append((prompt, completion))


async def under_load(path: Path, updates: int, folder: Path, report: Report) -> dict[str, Any]:
    """Publish so many versions to an engine at work; returns the figures by name."""
    config = Config(
        model=ModelConfig(path=str(path), dtype="float32", max_model_len=256),
        actors=ActorsConfig(kv_cache_bytes=256 << 20, max_num_seqs=IN_FLIGHT),
    )
    started = await VllmPolicy.start(config)
    try:
        endless = VllmPolicy(started.engine, lambda _: {"ignore_eos": True, "detokenize": False})
        return await _measure(endless, Learner(path), updates, folder, report)
    finally:
        started.close()


async def _measure(
    policy: VllmPolicy,
    learner: Learner,
    updates: int,
    folder: Path,
    report: Report,
) -> dict[str, Any]:
    endpoint, failures = f"ipc://{folder}/load", 0
    following = asyncio.create_task(Subscriber("actor-0", endpoint, policy, SYNC).run())
    load, asking = Load(policy, learner), list[asyncio.Task[None]]()
    gauges: list[dict[str, float]] = []
    try:
        with Publisher(SYNC, 1, 1, endpoint) as publisher:
            try:
                for version in range(updates + 1):
                    gauges.append(await asyncio.to_thread(_update, publisher, learner, version))
                    if not asking:  # verified weights serve from here on
                        asking = [asyncio.create_task(load.keep_asking()) for _ in range(IN_FLIGHT)]
                    if version % max(1, updates // 4) == 0:
                        report(f"update {version} of {updates}, {len(load.done)} requests done")
            except WeightSyncError as error:
                report(f"weight sync failed: {error}")
                failures += 1
    finally:
        for task in (*asking, following):
            task.cancel()
        await asyncio.gather(*asking, following, return_exceptions=True)
    pauses = np.array([each["sync/generation_pause_s"] for each in gauges[1:]])
    return {
        "updates": len(pauses),
        "requests": len(load.done),
        "lost_requests": load.lost,
        "verification_failures": failures + int(gauges[-1]["sync/refits"]),
        "generation_pause_p50_s": float(np.quantile(pauses, 0.5)),
        "generation_pause_p99_s": float(np.quantile(pauses, 0.99)),
        "apply_s": float(np.median([each["sync/apply_s"] for each in gauges[1:]])),
        "requests_over_updates": sum(len(set(c.versions.tolist())) > 1 for _, c in load.done),
        "versions_go_forwards": all((np.diff(c.versions) >= 0).all() for _, c in load.done),
        "logprob_error_max": _error(learner, load.done),
    }


def _update(publisher: Publisher, learner: Learner, version: int) -> dict[str, float]:
    learner.at(version)
    named = learner.model.named_parameters()
    publisher.publish(version, named, learner.probe, learner.logprobs(learner.probe).tolist())
    publisher.wait_applied(version, UPDATE_S)
    return publisher.gauges()


def _error(learner: Learner, done: list[Done]) -> float:
    """The largest distance of log-probs from the learner's, where an update came in between."""
    mixed = [each for each in done if len(set(each[1].versions.tolist())) > 1]
    worst = 0.0
    for prompt, completion in mixed[:: max(1, len(mixed) // CHECKED)]:
        for version in set(completion.versions.tolist()):
            learner.at(version)
            expected = learner.logprobs([*prompt, *completion.tokens.tolist()])[len(prompt) - 1 :]
            mine = completion.versions == version
            worst = max(worst, float(np.abs(completion.logprobs[mine] - expected[mine]).max()))
    return worst

"""The probe of weight sync where engine and learner compute in bf16.

A learner takes steps, and an engine of vLLM follows it as an actor does: calibrated by the weights
that it loaded itself, then a version for each step, verified before the next. Both are on this
machine's device, and no rollout is made.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from actors.policies.vllm import VllmPolicy
from actors.prompt import load_tokenizer
from configs.schema import ActorsConfig, Config, LearnerConfig, ModelConfig, WeightSyncConfig
from learner.imitation import imitate, share_out
from learner.model.engine import Engine
from learner.run import draw_probe
from weight_sync.publisher import Publisher
from weight_sync.subscriber import Subscriber

VERSIONS = 20
DEADLINE_S = 120.0  # for a version to be verified
_ROWS, _TOKENS = 8, 48
_LR = 1e-3  # in bf16 smaller steps are rounded away


class Probed(NamedTuple):
    """The probe of one version: |difference of log-probs| in nats, and refits so far."""

    mean: float
    largest: float
    refits: int


def bf16_config(model_path: str, head_dtype: str = "") -> Config:
    """A configuration in bf16 of one actor with a small cache."""
    return Config(
        model=ModelConfig(
            path=model_path,
            dtype="bfloat16",
            head_dtype="float32" if head_dtype else "",
            max_model_len=256,
        ),
        actors=ActorsConfig(kv_cache_bytes=64 << 20, max_num_seqs=4),
        weight_sync=WeightSyncConfig(join_deadline_s=DEADLINE_S, publish_deadline_s=DEADLINE_S),
        learner=LearnerConfig(lr=_LR),
    )


class Followed:
    """A learner and the engine that follows it; `version` is the last one published."""

    def __init__(self, config: Config, learner: Engine, publisher: Publisher) -> None:
        self.learner, self.version = learner, -1
        self._config, self._publisher = config, publisher
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        self._tokens = draw_probe(tokenizer, config.seed, config.weight_sync.probe_tokens)
        self._numbers = np.random.default_rng(config.seed)

    async def begin(self) -> Probed:
        """Calibrate the engine and have it verify version 0."""
        self._publisher.calibrate(self.learner.probe(self._tokens))
        await asyncio.to_thread(self._publisher.wait_for_actors, DEADLINE_S)
        return await self.publish()

    async def step(self) -> Probed:
        """Take a step on drawn rows, publish it, and have it verified."""
        drawn = self._numbers.choice(self._tokens, (_ROWS, _TOKENS)).astype(np.int32)
        rows = [[(row[:1], False), (row[1:], True)] for row in drawn]
        (share,) = share_out(rows, self.version + 1, self._config.learner)
        imitate(self.learner, share, self._config.learner.lr)
        return await self.publish()

    async def publish(
        self, named_weights: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> Probed:
        """Publish the learner's weights, or those given in their place, beside its own log-probs.

        Raises VerificationFailed where the engine's differ from them.
        """
        self.version += 1
        weights = self.learner.named_weights() if named_weights is None else named_weights
        logprobs = self.learner.probe(self._tokens)
        self._publisher.publish(self.version, weights, self._tokens, logprobs)
        await asyncio.to_thread(self._publisher.wait_applied, self.version, DEADLINE_S)
        gauges = self._publisher.gauges()
        names = ("sync/probe_mean", "sync/probe_error", "sync/refits")
        mean, largest, refits = (gauges[name] for name in names)
        return Probed(mean, largest, int(refits))


@contextlib.asynccontextmanager
async def followed(config: Config, folder: Path) -> AsyncIterator[Followed]:
    """Start learner and engine; `folder` is for their socket. Raises EngineUnusable, BadModel."""
    endpoint = f"ipc://{folder}/weights"
    learner = Engine(config)
    try:
        policy = await VllmPolicy.start(config)
        try:
            subscriber = Subscriber("actor-0", endpoint, policy, config.weight_sync)
            following = asyncio.create_task(subscriber.run())
            try:
                with Publisher(
                    config.weight_sync, 1, 0, endpoint, dtype=config.engine_dtype
                ) as publisher:
                    yield Followed(config, learner, publisher)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        finally:
            policy.close()
    finally:
        learner.close()


def probe_figures(
    model_path: str, versions: int = VERSIONS, head_dtype: str = ""
) -> dict[str, float]:
    """Nats over `versions` verified ones: the mean of `probe_mean_bf16`, `probe_largest_bf16`.

    `head_dtype` is `model.head_dtype`. Raises EngineUnusable, BadModel, WeightSyncError.
    """
    found = asyncio.run(_probed(bf16_config(model_path, head_dtype), versions))
    return {
        "probe_mean_bf16": float(np.mean([each.mean for each in found])),
        "probe_largest_bf16": max(each.largest for each in found),
    }


async def _probed(config: Config, versions: int) -> list[Probed]:
    with TemporaryDirectory(prefix="forage-probe-") as folder:
        async with followed(config, Path(folder)) as both:
            await both.begin()
            return [await both.step() for _ in range(versions)]

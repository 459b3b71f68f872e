"""One real vLLM actor that follows a publisher and samples all the time.

`python vllm_actor.py ACTOR_ID ENDPOINT MODEL [WORKERS]` says `verified V` of each version that
serves, and `sampled V ...` of the versions in each completion.
"""

import asyncio
import sys

from actors.policies.vllm import VllmPolicy
from configs.runtime.process import begin, die_with_parent
from configs.schema import ActorsConfig, Config, ModelConfig, WeightSyncConfig
from weight_sync.subscriber import Subscriber

SYNC = WeightSyncConfig(probe_tolerance=1e-4, join_deadline_s=300.0, publish_deadline_s=8.0)


async def sample(policy: VllmPolicy, serving: asyncio.Event) -> None:
    """One completion after the other, of whatever serves."""
    await serving.wait()
    while True:
        done = await policy.complete([5, 6, 7], temperature=1.0, seed=1, max_tokens=40, stops=())
        print("sampled", *sorted(set(done.versions.tolist())), flush=True)


async def main(actor_id: str, endpoint: str, path: str, workers: str = "1") -> None:
    """Until killed."""
    config = Config(
        model=ModelConfig(path=path, dtype="float32", max_model_len=256),
        actors=ActorsConfig(kv_cache_bytes=64 << 20, tensor_parallel=int(workers)),
    )
    policy = await VllmPolicy.start(config)
    endless = VllmPolicy(policy.engine, lambda _: {"ignore_eos": True, "detokenize": False})
    tell = lambda _, version: print("verified", version, flush=True)  # noqa: E731
    subscriber = Subscriber(actor_id, endpoint, endless, SYNC, tell)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(subscriber.run())
        for _ in range(8):
            tasks.create_task(sample(endless, subscriber.serving))


if __name__ == "__mp_main__":
    die_with_parent()  # vLLM's engine child imports this file under that name
if __name__ == "__main__":
    begin(sys.argv[1])
    asyncio.run(main(*sys.argv[1:]))

"""A model's generation with the machine to itself: by rollouts in flight, tokens that are taken in,
and what rollouts look like.
"""

import asyncio
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from actors.prompt import Prompter, load_tokenizer
from configs.runtime.process import loop_factory
from configs.schema import Config
from replay.codec import decode_trajectory
from replay.questions import questions_of
from scripts.bench.end_to_end.loop import engines, rolling_out
from scripts.bench.end_to_end.plan import AT_ONCE
from scripts.bench.overlap.run import Bench, Cell, Timing
from scripts.bench.plan.record import Generation, GenerationJob, Rate
from scripts.plan.build import cache_block
from scripts.plan.past import workload_of_groups
from scripts.plan.workload import Latency
from scripts.setup import preflight

if TYPE_CHECKING:  # torch and vLLM take seconds
    from actors.policies.vllm import VllmPolicy

DEADLINE_S = 900.0
PROMPTS, SHORT, LONG, REPEATS = 64, 16, 160, 3  # requests of one token each, and their tokens


def generate(job: GenerationJob) -> Generation:
    """Measure all of it. Raises CellFailed, PolicyError."""
    config = preflight.checked(job.config, job.overrides)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_generate(job, config))


async def _generate(job: GenerationJob, config: Config) -> Generation:
    async with engines(config, 1) as (policy,):
        await policy.set_policy_version(0)
        async with rolling_out(config, policy) as rollouts:
            batches = [await rollouts.batch(0) for _ in range(job.batches)]
        bench = _bench(job, config, policy)
        alone = [
            await _rate(bench, job, n, number, config.actors.max_num_seqs)
            for number, n in enumerate(job.in_flight)
        ]
        prefill_s = await _prefill_s(policy, config)
    groups = [list(map(decode_trajectory, group)) for each in batches for group in each.groups]
    block = cache_block(config)
    work = workload_of_groups(groups, Latency(0.0, 0.0), block)
    shapes = tuple((shape.prompt, shape.turns) for shape in work.shapes)
    return Generation(tuple(alone), prefill_s, shapes, work.siblings, block)


def _bench(job: GenerationJob, config: Config, policy: "VllmPolicy") -> Bench:
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    asked = questions_of(config, "train").questions
    siblings = tuple(each for each in asked for _ in range(config.replay.group_size))
    return Bench(config, policy, prompter, siblings, job.server, DEADLINE_S)


async def _rate(bench: Bench, job: GenerationJob, in_flight: int, number: int, seats: int) -> Rate:
    cell = Cell("continuous", AT_ONCE, in_flight)
    found = await bench.measure(cell, Timing(*job.window), 1_000_000 * number)
    return Rate(
        in_flight=in_flight,
        running=found["seats_filled"] * seats,
        tokens_per_s=found["tokens_per_s"],
        cores=sum(found["cpu"].values()),
        search_s=found["waited_p50_s"],
    )


async def _prefill_s(policy: "VllmPolicy", config: Config) -> float:
    """Seconds of a token that is taken in: of long prompts beyond short ones, the median."""
    chance, vocabulary = np.random.default_rng(0), 100

    async def taken_in(tokens: int) -> float:
        prompts = chance.integers(4, vocabulary, (PROMPTS, tokens)).tolist()
        begun = time.perf_counter()
        await asyncio.gather(
            *(
                policy.complete(prompt, temperature=1.0, seed=0, max_tokens=1, stops=())
                for prompt in prompts
            )
        )
        return time.perf_counter() - begun

    longest = min(LONG, config.model.max_model_len - 1)
    await taken_in(longest)
    found = [await taken_in(longest) - await taken_in(SHORT) for _ in range(REPEATS)]
    return max(0.0, statistics.median(found)) / (PROMPTS * (longest - SHORT))

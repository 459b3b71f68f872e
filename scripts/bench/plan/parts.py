"""A model's parts, each with the machine to itself: generation by rollouts in flight, tokens that
are taken in, training. Each is a child process of its own, as in a run.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.prompt import Prompter, load_tokenizer
from configs.runtime.files import write_durably
from configs.runtime.process import loop_factory
from configs.schema import Config
from replay.codec import decode_reply, decode_trajectory, encode
from replay.protocol import Batch
from replay.questions import read_questions
from scripts.bench.end_to_end.loop import Freely, engines, rolling_out
from scripts.bench.end_to_end.plan import AT_ONCE
from scripts.bench.harness import BenchError
from scripts.bench.overlap.run import Bench, Cell, Timing
from scripts.bench.plan.record import Generation, PartsJob, Rate, Training
from scripts.plan.past import workload_of_groups
from scripts.plan.workload import Latency
from scripts.setup import preflight

if TYPE_CHECKING:  # torch and vLLM take seconds
    from actors.policies.vllm import VllmPolicy

BATCH = "batch"  # what was rolled out, and is trained on
DEADLINE_S = 900.0
PROMPTS, SHORT, LONG, REPEATS = 64, 16, 160, 3  # requests of one token each, and their tokens


def generate(job: PartsJob) -> Generation:
    """Measure generation; leave a batch for training. Raises BenchError, CellFailed and
    PolicyError.
    """
    config = preflight.checked(job.config, job.overrides)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_generate(job, config))


async def _generate(job: PartsJob, config: Config) -> Generation:
    async with engines(config, 1) as (policy,):
        await policy.set_policy_version(0)
        async with rolling_out(config, policy, Freely) as rollouts:
            batches = [await rollouts.batch(0) for _ in range(job.batches)]
        bench = _bench(job, config, policy)
        alone = [
            await _rate(bench, job, n, number, config.actors.max_num_seqs)
            for number, n in enumerate(job.in_flight)
        ]
        prefill_s = await _prefill_s(policy, config)
    write_durably(Path(job.folder) / BATCH, encode(batches[0]))
    groups = [list(map(decode_trajectory, group)) for each in batches for group in each.groups]
    work = workload_of_groups(groups, Latency(0.0, 0.0))
    shapes = tuple((shape.prompt, shape.turns) for shape in work.shapes)
    return Generation(tuple(alone), prefill_s, shapes, work.siblings)


def _bench(job: PartsJob, config: Config, policy: "VllmPolicy") -> Bench:
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    asked = read_questions(config.questions.train, columns=config.questions.columns).questions
    siblings = tuple(each for each in asked for _ in range(config.replay.group_size))
    return Bench(config, policy, prompter, siblings, job.server, DEADLINE_S)


async def _rate(bench: Bench, job: PartsJob, in_flight: int, number: int, seats: int) -> Rate:
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


def train(job: PartsJob) -> Training:
    """Train on the batch several times; the first is not counted. Raises BenchError."""
    import torch

    from learner.trainer import Trainer
    from scripts.train_sync import learn

    config, path = preflight.checked(job.config, job.overrides), Path(job.folder) / BATCH
    batch = decode_reply(path.read_bytes())
    if not isinstance(batch, Batch):
        raise BenchError(f"{path} holds no batch")
    torch.set_num_threads(config.learner.threads)
    trainer = Trainer(config)
    step = _timed(lambda: learn(trainer, batch))
    step()
    wall_s, cpu_s = map(statistics.median, zip(*(step() for _ in range(job.updates)), strict=True))
    tokens = sum(len(decode_trajectory(each).tokens) for group in batch.groups for each in group)
    return Training(tokens, wall_s, cpu_s)


def _timed(act: Callable[[], object]) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        act()
        return time.perf_counter() - wall_s, time.process_time() - cpu_s

    return run

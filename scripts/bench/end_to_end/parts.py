"""Generation and training alone: the parts of which the ideal is reckoned."""

import asyncio
import statistics
import time
from typing import TYPE_CHECKING

from actors.prompt import Prompter, load_tokenizer
from configs.runtime.process import loop_factory
from configs.schema import Config
from replay.protocol import Batch
from replay.questions import questions_of
from scripts.bench.end_to_end.loop import action_tokens, engines, rolling_out
from scripts.bench.end_to_end.plan import AT_ONCE
from scripts.bench.end_to_end.record import Job, Parts
from scripts.bench.overlap.run import Bench, Cell, Timing
from scripts.train_sync import learn

if TYPE_CHECKING:
    from actors.policies.vllm import VllmPolicy
    from learner.trainer import Trainer

THREADS = (1, 2)
DEADLINE_S = 1200.0  # of generation alone, however slow the model and busy the machine


def measure_parts(job: Job, config: Config) -> Parts:
    """Measure generation, then training on a batch of it; of training the faster number of threads
    and the least processor time. Raises CellFailed, PolicyError.
    """
    from learner.trainer import Trainer

    trainer = Trainer(config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        batch, generation = runner.run(_generate(job, config))
    training = [_update(trainer, batch, threads, job.steps) for threads in THREADS]
    return Parts(
        **generation,
        update_s=min(wall_s for wall_s, _ in training),
        update_cpu_s=min(cpu_s for _, cpu_s in training),
        update_tokens=action_tokens(batch),
    )


async def _generate(job: Job, config: Config) -> tuple[Batch, dict[str, float]]:
    async with engines(config, 1) as (policy,):
        await policy.set_policy_version(0)
        async with rolling_out(config, policy) as rollouts:
            batch = await rollouts.batch(0)
        return batch, await _rate(job, config, policy)


async def _rate(job: Job, config: Config, policy: "VllmPolicy") -> dict[str, float]:
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    asked = questions_of(config, "train").questions
    # Siblings are asked one after the other, as in a run, and share their searches.
    siblings = tuple(each for each in asked for _ in range(config.replay.group_size))
    bench = Bench(config, policy, prompter, siblings, job.server, DEADLINE_S)
    cell = Cell("continuous", AT_ONCE, job.in_flight_alone)
    found = await bench.measure(cell, Timing(*job.window), 0)
    return {
        "tokens_per_s": found["tokens_per_s"],
        "token_cpu_s": sum(found["cpu"].values()) / found["tokens_per_s"],
        "turn_s": found["generate_s"] * found["rollouts"] / found["turns"],
    }


def _update(trainer: "Trainer", batch: Batch, threads: int, repeats: int) -> tuple[float, float]:
    """The medians of a step's seconds and processor seconds; the first is not counted."""
    import torch

    torch.set_num_threads(threads)
    found = []
    for _ in range(repeats + 1):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        learn(trainer, batch)
        found.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    walls, cpus = zip(*found[1:], strict=True)
    return statistics.median(walls), statistics.median(cpus)

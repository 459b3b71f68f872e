"""A model's parts: generation alone by rollouts in flight, training alone, and both beside one
another. Generation is one child process with its engine, training another, as in a run.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from actors.prompt import Prompter, load_tokenizer
from configs.runtime.files import write_durably
from configs.runtime.process import end_child, loop_factory, start_child
from configs.schema import Config
from replay.codec import decode_reply, decode_trajectory, encode
from replay.protocol import Batch
from replay.questions import read_questions
from scripts.bench.end_to_end.loop import Freely, engines, rolling_out
from scripts.bench.end_to_end.plan import AT_ONCE
from scripts.bench.harness import BenchError
from scripts.bench.overlap.run import Bench, Cell, Timing
from scripts.bench.plan.record import Parts, PartsJob, Rate, Training
from scripts.plan.past import shape_of
from scripts.setup import preflight

if TYPE_CHECKING:  # torch and vLLM take seconds
    from actors.policies.vllm import VllmPolicy

WORKER = "scripts.bench.plan.worker"
BATCH, ALONE, STOP, BESIDE = "batch", "alone.json", "stop", "beside.json"
DEADLINE_S, POLL_S = 900.0, 0.1
PROMPTS, SHORT, LONG, REPEATS = 64, 16, 160, 3  # requests of one token each, and their tokens


def measure_parts(job: PartsJob) -> Parts:
    """Measure all of it. Raises BenchError, CellFailed, PolicyError."""
    config = preflight.checked(job.config, job.overrides)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_measure(job, config))


async def _measure(job: PartsJob, config: Config) -> Parts:
    folder = Path(job.folder)
    async with engines(config, 1) as (policy,):
        await policy.set_policy_version(0)
        async with rolling_out(config, policy, Freely) as rollouts:
            batch = await rollouts.batch(0)
        write_durably(folder / BATCH, encode(batch))
        bench = _bench(job, config, policy)
        alone = [await _rate(bench, job, n, number) for number, n in enumerate(job.in_flight)]
        prefill_s = await _prefill_s(policy, config)
        trainer = start_child(
            ["-m", WORKER, "train", msgspec.json.encode(job).decode()], log=folder / "train.log"
        )
        try:
            training = msgspec.json.decode(await _written(folder / ALONE, trainer), type=Training)
            beside = await _rate(bench, job, job.in_flight[-1], len(alone))
            write_durably(folder / STOP, b"")
            seconds = msgspec.json.decode(await _written(folder / BESIDE, trainer), type=float)
        finally:
            end_child(trainer, patience_s=1.0)
    return Parts(tuple(alone), beside, seconds, training, prefill_s, _shapes(batch))


def _bench(job: PartsJob, config: Config, policy: "VllmPolicy") -> Bench:
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    asked = read_questions(config.questions.train, columns=config.questions.columns).questions
    siblings = tuple(each for each in asked for _ in range(config.replay.group_size))
    return Bench(config, policy, prompter, siblings, job.server, DEADLINE_S)


async def _rate(bench: Bench, job: PartsJob, in_flight: int, number: int) -> Rate:
    cell = Cell("continuous", AT_ONCE, in_flight)
    found = await bench.measure(cell, Timing(*job.window), 1_000_000 * number)
    return Rate(in_flight, found["tokens_per_s"], sum(found["cpu"].values()))


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


async def _written(path: Path, child: Any) -> bytes:
    """Wait for a file of the training child. Raises BenchError where it ends without, or late."""
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        if child.poll() is not None or time.monotonic() > end_s:
            said = (path.parent / "train.log").read_text(errors="replace").splitlines()[-6:]
            raise BenchError(f"training alone wrote no {path.name}: {' | '.join(said)}")
        await asyncio.sleep(POLL_S)
    return path.read_bytes()


def _shapes(batch: Batch) -> tuple[tuple[int, tuple[tuple[int, int, bool], ...]], ...]:
    rollouts = (decode_trajectory(each) for group in batch.groups for each in group)
    shapes = (shape_of(rollout) for rollout in rollouts)
    return tuple((shape.prompt, shape.turns) for shape in shapes)


def train(job: PartsJob) -> None:
    """Train on the batch alone, write how long that takes; then go on until told to stop, and write
    how long it took meanwhile.
    """
    import torch

    from learner.trainer import Trainer
    from scripts.train_sync import learn

    config, folder = preflight.checked(job.config, job.overrides), Path(job.folder)
    torch.set_num_threads(config.learner.threads)
    trainer = Trainer(config)
    batch = decode_reply((folder / BATCH).read_bytes())
    if not isinstance(batch, Batch):
        raise BenchError(f"{folder / BATCH} holds no batch")
    step = _timed(lambda: learn(trainer, batch))
    step()
    alone = [step() for _ in range(job.updates)]
    probe = tuple(range(4, 4 + config.weight_sync.probe_tokens))
    publish = _timed(
        lambda: (trainer.probe(probe), [w.clone() for _, w in trainer.named_weights()])
    )
    publish()
    published_s = statistics.median(publish()[0] for _ in range(job.updates))
    wall_s, cpu_s = (statistics.median(each) for each in zip(*alone, strict=True))
    write_durably(folder / ALONE, msgspec.json.encode(Training(wall_s, cpu_s, published_s)))
    beside, end_s = list[float](), time.monotonic() + DEADLINE_S
    while not (folder / STOP).exists() and time.monotonic() < end_s:
        beside.append(step()[0])
    # The first began before anything was generated beside it, the last may have outlasted it.
    write_durably(folder / BESIDE, msgspec.json.encode(statistics.median(beside[1:-1] or beside)))


def _copied(named: tuple[str, Any]) -> Any:
    return named[1].clone()


def _timed(act: Callable[[], object]) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        act()
        return time.perf_counter() - wall_s, time.process_time() - cpu_s

    return run

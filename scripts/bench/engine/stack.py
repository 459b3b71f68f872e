"""Our rollouts on a real engine, and their requests alone on a bare one, side by side.

*Rollouts*: the actors' runner, loop, environment, audit, rewards and retrieval client on a policy
started as an actor's. *Bare*: vLLM's AsyncLLM with its own settings, which is asked the same
prompts for as many tokens, turn after turn of as many sequences. Both engines hold the same model.
"""

import asyncio
import itertools
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter, load_tokenizer
from actors.rewards.scorer import Rewards
from actors.runner import MeteredPolicy, Runner, VerifiedVersions
from actors.token_audit import TokenAudit
from configs.load import load
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Trajectory
from retrieval_server.client import RetrievalClient
from scripts.bench.engine.bare import BareEngine
from scripts.bench.harness import BenchError, Report
from scripts.bench.overlap.loops import Lessor, leases
from scripts.bench.overlap.server import Latency, serving
from scripts.bench.overlap.task import prepare_model, questions
from scripts.demo.task import DemoFiles, prepare

SEATS, LAYERS, SEED = 16, 8, 0
OVERSUBSCRIBED = 2  # rollouts in flight, of the seats
DEADLINE_S = 240.0
AT_ONCE = Latency(0.0, 0.0).path


class Sizes(NamedTuple):
    """The rollouts of a window, and how many windows of rollouts there are."""

    rollouts: int
    repeats: int


class Rate(NamedTuple):
    """Sampled tokens in a second, and in a second of the engine's process on a core."""

    per_s: float
    per_cpu_s: float


class _Meter:
    """The rate of an engine from now on."""

    def __init__(self, engine: Any, tokens: int) -> None:
        (child,) = engine.engine_core.resources.engine_manager.processes
        self._process = psutil.Process(child.pid)
        self._begun_s, self._begun_cpu_s, self._tokens = time.monotonic(), self._cpu_s(), tokens

    def rate(self, tokens: int) -> Rate:
        """The rate until now."""
        more, used_s = tokens - self._tokens, self._cpu_s() - self._begun_cpu_s
        return Rate(more / (time.monotonic() - self._begun_s), more / max(used_s, 1e-3))

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def demo_files(report: Report) -> DemoFiles:
    """The demo's files, made where they are missing. Raises ColdStartFailed."""
    return prepare(REPOSITORY / ".cache", SEED, report)


def measure(sizes: Sizes, report: Report) -> dict[str, Any]:
    """The figures of rollouts and bare engine. Raises BenchError, PolicyError."""
    files = demo_files(report)
    model = prepare_model(files.model, LAYERS, report)
    overrides = (
        f"model.path={model}",
        f"retrieval.corpus={files.corpus}",
        f"seed={SEED}",
        f"actors.max_num_seqs={SEATS}",
        "actors.drain_deadline_s=0.01",  # what is in flight behind the window is of no use
    )
    config = load(REPOSITORY / "configs" / "demo.yaml", overrides)
    with serving(files.corpus, SEED) as (url, _):
        pairs = asyncio.run(_pairs(config, f"{url}/{AT_ONCE}", sizes, report))
    return {
        "rollouts_over_bare_vllm": statistics.median(a.per_s / b.per_s for a, b in pairs),
        "rollouts_over_bare_vllm_cpu": statistics.median(
            a.per_cpu_s / b.per_cpu_s for a, b in pairs
        ),
        "rollouts_tokens_per_s": statistics.median(ours.per_s for ours, _ in pairs),
        "bare_tokens_per_s": statistics.median(bare.per_s for _, bare in pairs),
        "windows": pairs,
    }


async def _pairs(config: Config, url: str, sizes: Sizes, report: Report) -> list[tuple[Rate, Rate]]:
    """The rates of the rollouts' windows, and of the bare ones before and after each."""
    logging.getLogger("actors.runner").setLevel(logging.ERROR)  # it names all that it ends
    report("starting two engines")
    policy = await VllmPolicy.start(config)
    try:
        bare = BareEngine(config)
        try:
            await policy.set_policy_version(0)
            _, done = await _rollouts(config, policy, url, sizes.rollouts, 0)  # warms up
            await _requests(bare, done, sizes.rollouts)
            before, pairs = await _requests(bare, done, sizes.rollouts), list[tuple[Rate, Rate]]()
            for repeat in range(1, sizes.repeats + 1):
                ours, done = await _rollouts(config, policy, url, sizes.rollouts, repeat)
                after = await _requests(bare, done, sizes.rollouts)
                beside = Rate(*(statistics.fmean(both) for both in zip(before, after, strict=True)))
                report(f"{ours.per_s:,.0f} tokens/s in rollouts, {beside.per_s:,.0f} bare")
                pairs.append((ours, beside))
                before = after
            return pairs
        finally:
            bare.close()
    finally:
        policy.close()


async def _rollouts(
    config: Config, policy: VllmPolicy, url: str, count: int, repeat: int
) -> tuple[Rate, list[Trajectory]]:
    """The rate of a window of `count` rollouts, and all that ended until its end."""
    await _forget(policy)
    in_flight, asked = OVERSUBSCRIBED * SEATS, config.retrieval
    first = repeat * 1_000_000
    lessor = Lessor(leases(questions(SEED), SEED, first), in_flight, whole=False)
    client = RetrievalClient(
        url, asked.timeout_s, asked.retries, asked.max_connections, cache_queries=0
    )
    meter = MeteredPolicy(policy)
    prompter = Prompter(load_tokenizer(config.model.path), config.questions, config.actors)
    audit = TokenAudit(prompter, config)
    rewards = Rewards.open(config)
    roll = partial(_roll, audit, meter, prompter, rewards, config)
    try:
        async with asyncio.timeout(DEADLINE_S), client, rewards, asyncio.TaskGroup() as group:
            runner = Runner(
                roll,
                retriever=client,
                writer=lessor,
                versions=_verified(),
                meter=meter,
                config=config,
            )
            group.create_task(runner.run())
            await lessor.settled(0.0, in_flight)
            window = _Meter(policy.engine, meter.tokens)
            await lessor.settled(0.0, count)
            rate = window.rate(meter.tokens)
            runner.stop("measured")
    except TimeoutError as error:
        raise BenchError(f"{count} rollouts did not end within {DEADLINE_S:g} s") from error
    return rate, lessor.done


async def _roll(
    audit: TokenAudit,
    meter: MeteredPolicy,
    prompter: Prompter,
    rewards: Rewards,
    config: Config,
    lease: Lease,
    retriever: Any,
) -> Trajectory:
    return await audit.rollout(
        lease,
        policy=meter,
        retriever=retriever,
        prompter=prompter,
        rewards=rewards,
        config=config,
        actor_id="bench",
    )


def _verified() -> VerifiedVersions:
    serving = asyncio.Event()
    serving.set()
    versions = VerifiedVersions(serving)
    versions.add(0, 0)  # the starting weights, which the engine says that it serves
    return versions


async def _forget(policy: VllmPolicy) -> None:
    """Drop the prefixes that an earlier window has cached."""
    await policy.pause()
    await policy.resume()


async def _requests(bare: BareEngine, done: Sequence[Trajectory], count: int) -> Rate:
    """The rate of the bare engine at the requests of these rollouts, over as many of them."""
    await bare.forget()
    following, ended, tokens = itertools.cycle(done), asyncio.Semaphore(0), 0
    in_flight = OVERSUBSCRIBED * SEATS

    async def keep_asking() -> None:
        nonlocal tokens
        while True:
            for prompt, wanted in _turns(next(following)):
                await bare.sample(prompt, wanted)
                tokens += wanted
            ended.release()

    asking = [asyncio.create_task(keep_asking()) for _ in range(in_flight)]
    try:
        async with asyncio.timeout(DEADLINE_S):
            await _ends(ended, in_flight, asking)
            window = _Meter(bare.engine, tokens)
            await _ends(ended, count, asking)
            return window.rate(tokens)
    except TimeoutError as error:
        raise BenchError(f"{count} bare rollouts did not end within {DEADLINE_S:g} s") from error
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _ends(
    ended: asyncio.Semaphore, count: int, asking: Sequence["asyncio.Task[None]"]
) -> None:
    """Wait for so many ends; raise what ended a task that asks."""
    for _ in range(count):
        await ended.acquire()
        for task in asking:
            if task.done():
                task.result()


def _turns(trajectory: Trajectory) -> Iterator[tuple[list[int], int]]:
    """Each turn's prompt, and how many tokens were sampled."""
    for sequence in trajectory.sequences:
        context: list[int] = sequence.prompt_tokens.tolist()
        for turn in sequence.turns:
            yield list(context), len(turn.action_tokens)
            context += turn.action_tokens.tolist() + turn.observation_tokens.tolist()

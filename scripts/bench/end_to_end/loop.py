"""The synchronous modes: the parts of `scripts/train_sync.py`, step by step, with their seconds.

*sync*: a batch's rollouts begin together and each goes on by itself, so that one generates while
another searches. *lockstep*: they take their turns together, all generate, then all search, which
is Search-R1's schedule. Then training, then the new weights.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from actors.gateway.rolling import rolling
from actors.policies.base import Completion, Policy, SamplingParams
from actors.prompt import Prompter, load_tokenizer
from actors.retrieval import open_retrieval
from actors.rewards.scorer import Rewards
from actors.runner import MeteredPolicy
from configs.runtime.process import loop_factory
from configs.schema import Config
from replay.log.summary import summarise_payload
from replay.protocol import Batch, Lease
from replay.trajectory import Question, Trajectory
from scripts.bench.end_to_end.record import Evaluation, Job, Record, Step, turns_of
from scripts.bench.overlap.loops import LockStep
from scripts.train_sync import Rollouts, learn, push

if TYPE_CHECKING:  # torch and vLLM take seconds
    from actors.policies.vllm import VllmPolicy
    from learner.trainer import Trainer

_group: ContextVar[int] = ContextVar("group", default=0)  # of the rollout that a task runs


class EnginesInTurn:
    """Several engines as one policy: the groups go to them in turn."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = policies

    async def complete(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> Completion:
        """Complete on the engine of the group that this task is about."""
        return await self._policies[_group.get() % len(self._policies)].complete(tokens, **sampling)


class Freely(Rollouts):
    """Rollouts that say which group they are of."""

    async def one(self, lease: Lease) -> Trajectory | None:
        """One rollout, in a task of its own."""
        _group.set(lease.group_id)
        return await super().one(lease)


class InStep(Freely):
    """Rollouts that take their turns together."""

    def __init__(
        self, config: Config, roll: Callable[[Lease], Awaitable[Trajectory]], step: LockStep
    ) -> None:
        super().__init__(config, roll)
        self.step = step
        self.slots = asyncio.Semaphore(1 << 20)  # who waited for one would hold the others up

    async def one(self, lease: Lease) -> Trajectory | None:
        """One rollout, which the others wait for until it ends."""
        try:
            return await super().one(lease)
        finally:
            self.step.left()

    async def group(self, question: Question) -> list[Trajectory]:
        """A group. All groups of a batch are here before the first rollout of any begins."""
        self.step.join(self.config.replay.group_size)
        return await super().group(question)

    async def evaluate(self) -> dict[str, float]:
        """Exact match, all questions in step."""
        self.step.join(len(self.eval_questions) * len(self.config.learner.eval_temperatures))
        return await super().evaluate()


def take_turns(job: Job, config: Config) -> Record:
    """Train by the job's schedule. Raises ActorError, NothingToLearn."""
    import torch

    from learner.trainer import Trainer

    torch.set_num_threads(config.learner.threads)
    trainer = Trainer(config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_train(job, trainer))


async def _train(job: Job, trainer: "Trainer") -> Record:
    in_step = job.kind == "lockstep"
    async with engines(trainer.config, job.engines) as policies:
        meter = MeteredPolicy(EnginesInTurn(policies))
        async with rolling_out(trainer.config, meter, in_step) as rollouts:
            return await take_steps(job, trainer, rollouts, policies, meter)


@contextlib.asynccontextmanager
async def engines(config: Config, count: int) -> AsyncIterator[list["VllmPolicy"]]:
    """So many engines, each a process of its own."""
    from actors.policies.vllm import VllmPolicy

    started: list[VllmPolicy] = []
    try:
        for _ in range(count):
            started.append(await VllmPolicy.start(config))
        yield started
    finally:
        for policy in started:
            policy.close()


@contextlib.asynccontextmanager
async def rolling_out(
    config: Config, policy: Policy, in_step: bool = False
) -> AsyncIterator[Rollouts]:
    """The rollouts of the configuration's questions; `in_step`: they take their turns together."""
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    async with open_retrieval(config) as retriever, Rewards.open(config) as rewards:
        step = LockStep(policy, retriever, 0)
        acting = step if in_step else policy
        async with rolling(
            config, policy=acting, prompter=prompter, rewards=rewards, actor_id="sync"
        ) as made:
            roll = partial(made.roll, retriever=step if in_step else retriever)
            yield InStep(config, roll, step) if in_step else Freely(config, roll)


async def take_steps(
    job: Job,
    trainer: "Trainer",
    rollouts: Rollouts,
    policies: Sequence["VllmPolicy"],
    meter: MeteredPolicy,
) -> Record:
    """Push, evaluate where the job says so, roll out, update; with the seconds of each."""
    steps, evaluations = list[Step](), list[Evaluation]()
    every, trained_s = trainer.config.learner.eval_every, 0.0
    with tempfile.TemporaryDirectory(dir=job.memory) as folder:
        for step in range(job.steps + 1):
            pushed_s = await _timed(_push_all(trainer, policies, step, Path(folder)))
            trained_s += pushed_s
            if job.learns and (step % every == 0 or step == job.steps):
                scores = await rollouts.evaluate()
                found = Evaluation(step, trained_s, scores["em"], scores.get("sampled_em"))
                evaluations.append(found)
            if step == job.steps:
                break
            before, asked_s = meter.tokens, time.monotonic()
            batch = await rollouts.batch(step)
            rolled_s = time.monotonic()
            learn(trainer, batch)
            done_s = time.monotonic()
            trained_s += done_s - asked_s
            steps.append(
                Step(
                    at_s=time.time(),
                    update_s=done_s - rolled_s,
                    wait_s=rolled_s - asked_s,
                    pause_s=pushed_s,
                    tokens=action_tokens(batch),
                    sampled=meter.tokens - before,
                    turns=turns_of(payload for group in batch.groups for payload in group),
                )
            )
    return Record(tuple(steps), tuple(evaluations))


async def _push_all(
    trainer: "Trainer", policies: Sequence["VllmPolicy"], version: int, folder: Path
) -> None:
    async def one(number: int, policy: "VllmPolicy") -> None:
        (own := folder / str(number)).mkdir(exist_ok=True)
        await push(trainer, policy, version, own)

    await asyncio.gather(*(one(*each) for each in enumerate(policies)))


async def _timed(act: Any) -> float:
    begun = time.monotonic()
    await act
    return time.monotonic() - begun


def action_tokens(batch: Batch) -> int:
    """The sampled tokens of a batch."""
    return sum(
        summarise_payload(payload).action_tokens for group in batch.groups for payload in group
    )

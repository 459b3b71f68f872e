"""The modes of one process: the parts of `scripts/train_sync.py`, step by step, with their seconds.

*sync*: a batch's rollouts begin together and each goes on by itself, so that one generates while
another searches. *lockstep*: they take their turns together, all generate, then all search, which
is Search-R1's schedule. Then training, then the new weights. *ahead*: as *sync*, but that training
has the next batch rolled out beside it, by the weights before: one step off.
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
            with tempfile.TemporaryDirectory(dir=job.memory) as folder:
                course = Course(job, trainer, rollouts, policies, meter, Path(folder))
                return await course.run()


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


class Course:
    """The steps of a job, with the seconds of each, and its evaluations; `folder`: for weights."""

    def __init__(
        self,
        job: Job,
        trainer: "Trainer",
        rollouts: Rollouts,
        policies: Sequence["VllmPolicy"],
        meter: MeteredPolicy,
        folder: Path,
    ) -> None:
        self._job, self._trainer, self._rollouts = job, trainer, rollouts
        self._policies, self._meter, self._folder = policies, meter, folder
        self._every, self._last = trainer.config.learner.eval_every, job.steps
        self._trained_s, self._pushed_s, self._sampled = 0.0, 0.0, 0
        self._steps, self._evaluations = list[Step](), list[Evaluation]()

    async def run(self) -> Record:
        """Take all of them."""
        await (self._ahead() if self._job.kind == "ahead" else self._in_turn())
        return Record(tuple(self._steps), tuple(self._evaluations))

    async def _in_turn(self) -> None:
        """Push, evaluate, roll out, update."""
        for step in range(self._last):
            await self._show(step)
            asked_s = time.monotonic()
            batch = await self._rollouts.batch(step)
            rolled_s = time.monotonic()
            learn(self._trainer, batch)
            self._note(batch, rolled_s - asked_s, time.monotonic() - rolled_s)
        await self._show(self._last)

    async def _ahead(self) -> None:
        """Roll each batch out beside the update of the one before it, which both end before the
        weights are pushed; the last update has one beside it, too.
        """
        await _push_all(self._trainer, self._policies, 0, self._folder)
        coming = asyncio.ensure_future(self._rollouts.batch(0))
        try:
            for step in range(self._last):
                asked_s = time.monotonic()
                batch = await coming
                waited_s = time.monotonic() - asked_s
                await self._show(step)
                coming = asyncio.ensure_future(self._rollouts.batch(step + 1))
                begun_s = time.monotonic()
                await asyncio.to_thread(learn, self._trainer, batch)
                self._note(batch, waited_s, time.monotonic() - begun_s, old=step > 0)
            if self._job.learns:
                await coming  # its evaluation has the engines to itself, as the others have
        finally:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await coming
        await self._show(self._last)

    async def _show(self, version: int) -> None:
        """Push the weights, and evaluate them where the job says so."""
        self._pushed_s = await _timed(
            _push_all(self._trainer, self._policies, version, self._folder)
        )
        self._trained_s += self._pushed_s
        if self._job.learns and (version % self._every == 0 or version == self._last):
            before = self._meter.tokens
            found = await self._rollouts.evaluate()
            self._sampled += self._meter.tokens - before
            scores = found["em"], found.get("sampled_em")
            self._evaluations.append(Evaluation(version, self._trained_s, *scores))

    def _note(self, batch: Batch, wait_s: float, update_s: float, *, old: bool = False) -> None:
        """A step that has ended now; `old`: its tokens are those of the version before."""
        self._trained_s += wait_s + update_s
        sampled, self._sampled = self._meter.tokens - self._sampled, self._meter.tokens
        self._steps.append(
            Step(
                at_s=time.time(),
                update_s=update_s,
                wait_s=wait_s,
                pause_s=self._pushed_s,
                tokens=action_tokens(batch),
                sampled=sampled,
                staleness=float(old),
                staleness_max=float(old),
                turns=turns_of(payload for group in batch.groups for payload in group),
            )
        )


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

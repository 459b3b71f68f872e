"""The whole algorithm in one process beside vLLM's engine child: no replay, no broadcast.

Weights enter the engine through a safetensors file in shared memory. For debuggers, and the
synchronous baseline: the parts are the asynchronous run's, and so are the bits where its engines
batch nothing and max_staleness is 0. `--recorded RUN` trains on what that run has recorded, and
starts no engine.
"""

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.errors import ActorError, EngineDead, EngineUnusable
from actors.gateway.rolling import rolling
from actors.prompt import Prompter, load_tokenizer
from actors.retrieval import open_retrieval
from actors.rewards.scorer import Rewards
from configs.load import ConfigError, save
from configs.runtime.files import vocabulary_of
from configs.runtime.process import Exit, begin
from configs.schema import Config
from learner import checkpoint
from learner.errors import BadModel
from learner.health.rules import Announcer
from learner.health.sentinels import Sentinels
from replay.codec import encode_trajectory
from replay.ledger.streaks import Streaks
from replay.log.history import recorded_batches
from replay.log.records import EVAL_GROUPS
from replay.protocol import Batch, CodecError, Lease, ReplayError
from replay.questions import Questions, left_out, questions_of
from replay.trajectory import Question, Sampling, Trajectory
from retrieval_server.protocol import RetrievalError
from scripts.command.options import argument, option, overrides, refusing
from scripts.command.terminal import FILE_WIDTH, broken, chatter_to, clean, logged_cause, status
from scripts.setup import preflight
from scripts.setup.retrieval import OwnServer, serving
from weight_sync.adapter import adapter_of
from weight_sync.protocol import require_done

if TYPE_CHECKING:  # seconds, that bad input need not wait for
    from actors.policies.vllm import VllmPolicy
    from learner.trainer import Trainer


ENGINE_LOG = "engine.log"


@dataclass(frozen=True)
class SyncOptions:
    config: str = argument("a YAML file, for example configs/demo.yaml")
    overrides: tuple[str, ...] = overrides()
    recorded: Path | None = option("train on this run's recorded batches", metavar="RUN")


UNFINISHED_STEPS = 4  # as many steps' groups that fail one after the other end the run


class NothingToLearn(Exception):
    """The rewards leave nothing to learn from; the message is the cause."""


class RolloutsFailed(ActorError):
    """Rollouts of one group after the other came to nothing; the message names the last cause."""


class Rollouts:
    """Replay and actors of a run of one process: leases questions and gathers their trajectories,
    as many at once as the fleet would. Groups have the ids, and so their tokens the seeds, that
    they have in a run of many processes which never waits.
    """

    def __init__(self, config: Config, roll: Callable[[Lease], Awaitable[Trajectory]]) -> None:
        self.config, self._roll = config, roll
        self.opened, self.evaluated, self.streaks = 1, EVAL_GROUPS, Streaks()
        self.failed, self.cause = 0, ""  # groups in a row, and why the last rollout did
        self.questions = Questions(questions_of(config, "train").questions, config.seed)
        self.eval_questions = questions_of(config, "eval").questions
        self.slots = asyncio.Semaphore(config.actors.slots * config.actors.count)

    async def one(self, lease: Lease) -> Trajectory | None:
        """One rollout, when a slot is free; made again with other seeds where it fails, up to
        `replay.max_question_failures` times, then None. Raises EngineDead.
        """
        for attempt in range(self.config.replay.max_question_failures):
            try:
                return await self._roll_out(msgspec.structs.replace(lease, attempt=attempt))
            except EngineDead:
                raise
            except TimeoutError:
                self.cause = f"rollout took over {self.config.actors.rollout_deadline_s:g} s"
            except (ActorError, RetrievalError, CodecError) as error:
                self.cause = f"{type(error).__name__}: {error}"
            where = f"group {lease.group_id} sibling {lease.sibling}"
            print(f"{where}: {clean(self.cause)}", file=sys.stderr, flush=True)
        return None

    async def _roll_out(self, lease: Lease) -> Trajectory:
        async with self.slots, asyncio.timeout(self.config.actors.rollout_deadline_s):
            trajectory = await self._roll(lease)
        encode_trajectory(trajectory)  # what no record holds fails as a delivery of the fleet would
        return trajectory

    async def group(self, question: Question) -> list[Trajectory]:
        """Every sibling of the next group, which asks `question`; none where one has failed.
        Raises EngineDead, RolloutsFailed.
        """
        group_id, how = self.opened, Sampling(self.config.actors.temperature, self.config.seed)
        self.opened += 1
        siblings = range(self.config.replay.group_size)
        leases = (Lease(group_id, n, "train", question, how) for n in siblings)
        rolled_out = await asyncio.gather(*map(self.one, leases))
        group = [each for each in rolled_out if each is not None]
        whole = len(group) == len(rolled_out)
        self.failed = 0 if whole else self.failed + 1
        if self.failed >= UNFINISHED_STEPS * self.config.replay.groups_per_step:
            raise RolloutsFailed(f"{self.failed} groups in a row have failed, by {self.cause}")
        return group if whole else []

    async def batch(self, step: int) -> Batch:
        """Groups for step + 1; the unscorable, and by configuration the signalless, replaced.
        Raises NothingToLearn where the fleet would stop.
        """
        groups: list[list[Trajectory]] = []
        wanted = self.config.replay.groups_per_step
        while len(groups) < wanted:
            chosen = [self.questions.next() for _ in range(wanted - len(groups))]
            for group in await asyncio.gather(*map(self.group, chosen)):
                if group:
                    self._close(group)
                needed = 1 + self.config.replay.drop_no_signal
                if len({t.reward for t in group} - {None}) >= needed:
                    groups.append(group)
        payloads = tuple(tuple(map(encode_trajectory, group)) for group in groups)
        ids, versions = tuple(group[0].group_id for group in groups), (step,) * wanted
        return Batch(step + 1, ids, versions, payloads, {}, {}, ())

    def _close(self, group: Sequence[Trajectory]) -> None:
        self.streaks.close([t.reward for t in group if t.reward is not None])
        why = next((t.reward_cause for t in group if t.reward is None), "")
        if cause := self.streaks.end(self.config.replay.groups_per_step, why):
            raise NothingToLearn(cause)

    async def evaluate(self) -> dict[str, float]:
        """Exact match over the evaluation questions: greedy, sampled where
        `learner.eval_temperature` says so, greedy by hops and on each data set.
        """
        leases = [
            Lease(group_id, n, "eval", question, Sampling(temperature, self.config.seed))
            for n, temperature in enumerate(self.config.learner.eval_temperatures)
            for group_id, question in enumerate(self.eval_questions, self.evaluated)
        ]
        self.evaluated += (count := len(self.eval_questions))
        rolled_out = await asyncio.gather(*map(self.one, leases))
        rewards = [each.reward if each else None for each in rolled_out]
        scores = {"em": rewards[:count]}
        if rewards[count:]:
            scores["sampled_em"] = rewards[count:]
        for question, reward in zip(self.eval_questions, rewards, strict=False):
            scores.setdefault(f"em_{question.hops}_hops", []).append(reward)
            if question.source:
                scores.setdefault(f"{question.source}/em", []).append(reward)
        return {name: _mean(found) for name, found in scores.items()}


def _mean(rewards: Sequence[float | None]) -> float:
    found = [reward for reward in rewards if reward is not None]
    return sum(found) / len(found) if found else 0.0


async def push(trainer: "Trainer", policy: "VllmPolicy", version: int, folder: Path) -> None:
    """Put the learner's weights, or adapter, into the engine through a file in shared memory."""
    import torch
    from safetensors.torch import save_file

    path, dtype = folder / "weights.safetensors", getattr(torch, trainer.config.engine_dtype)
    save_file({name: each.to(dtype).contiguous() for name, each in trainer.named_weights()}, path)
    await policy.pause()
    require_done(await policy.call_workers("load_snapshot", str(path), version))
    await policy.set_policy_version(version)
    await policy.resume()


class Watch:
    """The sentinels of a run of one process; `wrong`: why one of them stops it, empty before."""

    def __init__(self, config: Config) -> None:
        self._sentinels, self._announcer = Sentinels(config), Announcer()
        self.wrong = ""

    def take(self, step: int, gauges: dict[str, float]) -> None:
        """Judge a step, and print what those say that begin to fire."""
        told, self.wrong, _ = self._sentinels.judge(step, gauges)
        for line in self._announcer.lines(step, gauges | told):
            print(broken(line, FILE_WIDTH), flush=True)


def learn(trainer: "Trainer", batch: Batch, watch: Watch | None = None) -> float:
    """Take one step, which `watch` judges; return its loss. Raises LearnerError."""
    from learner.batch import build

    begun, learner = time.monotonic(), trainer.config.learner
    with status(f"learning step {batch.step}"):
        vocabulary = vocabulary_of(trainer.config.model.path)
        turn_weight = trainer.config.rewards.weights.environment
        built = build(batch, learner, vocabulary, turn_weight)
        gauges = trainer.learn([built])
    loss, seconds = gauges["learner/loss"], f"update {time.monotonic() - begun:.2f} s"
    print(f"step {batch.step}/{learner.total_steps}  loss {loss:+.3f}  {seconds}", flush=True)
    if watch:
        watch.take(batch.step, gauges)
    return loss


async def take_steps(
    trainer: "Trainer", rollouts: Rollouts, policy: "VllmPolicy", folder: Path
) -> dict[str, Any]:
    """Push, evaluate, roll out, update; `learner.total_steps` times, or until there is nothing to
    learn or, while steps are left, a sentinel stops it: then the cause is `stopped`.
    """
    learner, losses, watch = trainer.config.learner, list[float](), Watch(trainer.config)
    for step in range(learner.total_steps + 1):
        await push(trainer, policy, step, folder)
        if step % learner.eval_every == 0 or step == learner.total_steps:
            with status(f"evaluating after step {step}"):
                scores = await rollouts.evaluate()
            print(f"evaluation at step {step}: {_short(scores)}", flush=True)
        if step < learner.total_steps:
            try:
                with status(f"rolling out for step {step + 1}"):
                    batch = await rollouts.batch(step)
                losses.append(learn(trainer, batch, watch))
            except NothingToLearn as nothing:
                return {**scores, "losses": losses, "stopped": str(nothing)}
        if watch.wrong and step + 1 < learner.total_steps:
            return {**scores, "losses": losses, "stopped": watch.wrong}
    return {**scores, "losses": losses}


def _short(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {score:.3f}" for name, score in scores.items())


async def train(
    trainer: "Trainer", tokenizer: Any, folder: Path, server: OwnServer | None
) -> dict[str, Any]:
    """Take every step on an engine; the last evaluation and the losses. Raises ServerFailed."""
    from actors.policies.vllm import VllmPolicy

    config = trainer.config
    prompter = Prompter(tokenizer, config.questions, config.actors)
    retrieval, scoring = open_retrieval(config), Rewards.open(config)
    log = Path(config.run_dir) / ENGINE_LOG
    print(f"starting the engine: what it says goes to {log}", file=sys.stderr, flush=True)
    with chatter_to(log) as terminal, status("starting the engine", terminal):
        policy = await VllmPolicy.start(config, adapter=adapter_of(config))
    try:
        if server:
            await server.ready()
        async with (
            retrieval as retriever,
            scoring as rewards,
            rolling(
                config, policy=policy, prompter=prompter, rewards=rewards, actor_id="sync"
            ) as made,
        ):
            rollouts = Rollouts(config, partial(made.roll, retriever=retriever))
            steps = take_steps(trainer, rollouts, policy, folder)
            return await (server.beside(steps) if server else steps)
    finally:
        policy.close()


def roll_out_and_train(trainer: "Trainer", tokenizer: Any) -> dict[str, Any]:
    """`train`, beside a retrieval server of its own unless something else answers searches."""
    config = trainer.config
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        server = None
        if config.starts_retrieval_server:
            server = stack.enter_context(serving(config, Path(config.run_dir)))
        try:
            return asyncio.run(train(trainer, tokenizer, Path(folder), server))
        except (EngineUnusable, EngineDead) as error:
            log = Path(config.run_dir) / ENGINE_LOG
            raise type(error)(f"{error}{logged_cause(log)}") from error


def learn_again(trainer: "Trainer", recorded: Iterator[Batch]) -> dict[str, Any]:
    """Train on recorded batches; the losses."""
    config, losses = trainer.config, list[float]()
    watch = Watch(config)
    for batch in itertools.islice(recorded, config.learner.total_steps):
        losses.append(learn(trainer, batch, watch))
        if watch.wrong and len(losses) < config.learner.total_steps:
            return {"losses": losses, "stopped": watch.wrong}
    return {"losses": losses}


def sync(options: SyncOptions) -> int:
    """Check, train, leave a checkpoint; STOPPED where there is nothing to learn. Raises
    ConfigError, ActorError, LearnerError, ServerFailed.
    """
    with refusing(BadModel, ReplayError):
        here = options.recorded is None  # else nothing is rolled out
        config = preflight.checked(options.config, options.overrides, here)
        if config.learner.ranks > 1:
            raise ConfigError(f"learner.ranks = {config.learner.ranks!r}: one process has one rank")
        for rule in config.sentinels.roll_back:
            raise ConfigError(
                f"sentinels.{rule} = 'rollback': forage sync saves a checkpoint only at its end, "
                "so it cannot go back: set it to 'stop' or use forage train"
            )
        recorded = recorded_batches(options.recorded) if options.recorded else None
        begin("sync")
        import torch

        from learner.trainer import Trainer

        torch.set_num_threads(config.learner.threads)
        with status("loading the model"):
            trainer = Trainer(config)
    for line in left_out(config):
        print(line, file=sys.stderr)
    path = Path(config.run_dir) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    save(config, path)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    summary = learn_again(trainer, recorded) if recorded else roll_out_and_train(trainer, tokenizer)
    step = len(summary["losses"])
    checkpoint.save(config, step, trainer, tokenizer)
    path.with_name("summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if cause := summary.get("stopped"):
        print(f"stopped: {clean(str(cause))}", file=sys.stderr)
        return Exit.STOPPED
    return Exit.DONE

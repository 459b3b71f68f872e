"""The whole algorithm in one process beside vLLM's engine child: no replay, no broadcast.

Rollouts, update and evaluation take turns; weights enter the engine through a safetensors file in
shared memory. For debuggers, and the synchronous baseline: the parts are the asynchronous run's,
and so are the bits where its engines batch nothing and max_staleness is 0. `--recorded RUN` trains
on what that run has recorded, and starts no engine.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from actors.prompt import Prompter, load_tokenizer
from actors.retrieval import open_retrieval
from actors.rewards import Rewards
from actors.vllm_policy import VllmPolicy
from configs.load import ConfigError, save
from configs.process import begin, die_with_parent
from learner import checkpoint
from learner.batch import build
from learner.errors import BadModel
from learner.trainer import Trainer
from replay.protocol import Batch, ReplayError
from replay.question_files import left_out
from scripts import launch
from scripts.own_server import OwnServer, ServerFailed, serving
from scripts.recorded import recorded_batches
from scripts.rollouts import Rollouts


async def push(trainer: Trainer, policy: VllmPolicy, version: int, folder: Path) -> None:
    """Put the learner's weights into the engine through a file in shared memory."""
    path = folder / "weights.safetensors"
    save_file({name: weight.contiguous() for name, weight in trainer.named_weights()}, path)
    await policy.pause()
    await policy.call_workers("load_snapshot", str(path), version)
    await policy.set_policy_version(version)
    await policy.resume()


def learn(trainer: Trainer, batch: Batch) -> float:
    """Take one step; return its loss."""
    begun, learner = time.monotonic(), trainer.config.learner
    loss = trainer.learn([build(batch, learner)])["learner/loss"]
    seconds = f"update {time.monotonic() - begun:.2f} s"
    print(f"step {batch.step}/{learner.total_steps}  loss {loss:+.3f}  {seconds}", flush=True)
    return loss


async def train(
    trainer: Trainer, tokenizer: Any, folder: Path, server: OwnServer | None
) -> dict[str, Any]:
    """Start an engine, take every step on it, end it. Return the last evaluation and every step's
    loss. Raises ServerFailed, as soon as the server has ended.
    """
    config = trainer.config
    prompter = Prompter(tokenizer, config.questions, config.actors)
    retrieval, scoring = open_retrieval(config), Rewards.open(config)
    policy = await VllmPolicy.start(config)
    try:
        if server:
            await server.ready()
        async with retrieval as retriever, scoring as rewards:
            parts = {"retriever": retriever, "prompter": prompter, "rewards": rewards}
            rollouts = Rollouts(config, policy=policy, **parts)
            steps = take_steps(trainer, rollouts, policy, folder)
            return await (server.beside(steps) if server else steps)
    finally:
        policy.close()


async def take_steps(
    trainer: Trainer, rollouts: Rollouts, policy: VllmPolicy, folder: Path
) -> dict[str, Any]:
    """Push, evaluate, roll out, update; `learner.total_steps` times."""
    learner, losses = trainer.config.learner, []
    for step in range(learner.total_steps + 1):
        await push(trainer, policy, step, folder)
        if step % learner.eval_every == 0 or step == learner.total_steps:
            scores = await rollouts.evaluate()
            print(f"evaluation at step {step}: {scores}", flush=True)
        if step < learner.total_steps:
            losses.append(learn(trainer, await rollouts.batch(step)))
    return {**scores, "losses": losses}


def roll_out_and_train(trainer: Trainer, tokenizer: Any) -> dict[str, Any]:
    """`train`, beside a retrieval server of its own unless something else answers searches."""
    config = trainer.config
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        server = None
        if config.starts_retrieval_server:
            server = stack.enter_context(serving(config, Path(config.run_dir)))
        return asyncio.run(train(trainer, tokenizer, Path(folder), server))


def main() -> int:
    """Check, train; exit code 2 on bad input, 1 where the retrieval server fails."""
    parser = argparse.ArgumentParser(description="Train in one process, synchronously.")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--recorded", metavar="RUN", help="train on this run's recorded batches")
    given = parser.parse_args()
    try:
        config = launch.checked(given.config, given.overrides)
        if config.learner.ranks > 1:
            raise ConfigError(f"learner.ranks = {config.learner.ranks!r}: one process has one rank")
        recorded = recorded_batches(given.recorded) if given.recorded else None
        begin("train_sync")
        torch.set_num_threads(config.learner.threads)
        trainer = Trainer(config)
    except (BadModel, ConfigError, ReplayError) as error:
        print(f"train_sync: {error}", file=sys.stderr)
        return 2
    for line in left_out(config.questions):
        print(line, file=sys.stderr)
    path = Path(config.run_dir) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    save(config, path)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    if recorded:
        total = config.learner.total_steps
        summary = {"losses": [learn(trainer, batch) for batch in itertools.islice(recorded, total)]}
    else:
        try:
            summary = roll_out_and_train(trainer, tokenizer)
        except ServerFailed as error:
            print(f"train_sync: {error}", file=sys.stderr)
            return 1
    step = len(summary["losses"])
    checkpoint.save(config, step, trainer, tokenizer)
    path.with_name("summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return 0


if __name__ == "__mp_main__":
    die_with_parent()  # vLLM's engine child imports this file under that name
if __name__ == "__main__":
    sys.exit(main())

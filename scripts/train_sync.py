"""The whole algorithm in one process beside vLLM's engine child: no replay, no broadcast.

Rollouts, update and evaluation take turns; weights enter the engine through a safetensors file in
shared memory. For debuggers, and the synchronous baseline: the parts are the asynchronous run's.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from actors.prompt import Prompter, load_tokenizer
from actors.rollout import rollout
from actors.vllm_policy import VllmPolicy
from configs.load import ConfigError, retrieval_url, save
from configs.process import begin, die_with_parent
from configs.schema import Config
from learner import batch as batches
from learner import checkpoint
from learner.ema import Ema
from learner.engine import Engine
from learner.update import update
from replay.codec import encode_trajectory
from replay.protocol import Batch, Lease
from replay.questions import Questions, load_questions
from replay.trajectory import Question, Sampling, Trajectory
from retrieval_server.client import RetrievalClient
from scripts import launch


class Rollouts:
    """Leases questions and gathers their trajectories, as many at once as the fleet would."""

    def __init__(self, config: Config, tokenizer: Any, **parts: Any) -> None:
        self.config, self.group_size, self.opened = config, config.replay.group_size, 0
        self.questions = Questions(load_questions(config.questions.train), config.seed)
        self.eval_questions = load_questions(config.questions.eval, config.questions.eval_limit)
        prompter = Prompter(tokenizer, config.questions, config.actors)
        self.parts = {**parts, "prompter": prompter}
        self.slots = asyncio.Semaphore(config.actors.rollouts_in_flight * config.actors.count)

    async def one(self, lease: Lease) -> Trajectory:
        """One rollout, when a slot is free."""
        async with self.slots, asyncio.timeout(self.config.actors.rollout_deadline_s):
            return await rollout(lease, config=self.config, actor_id="sync", **self.parts)

    async def group(self, question: Question) -> list[Trajectory]:
        """Every sibling of the next group, which asks `question`."""
        self.opened += 1
        group_id, how = self.opened, Sampling(self.config.actors.temperature, self.config.seed)
        leases = (Lease(group_id, n, "train", question, how) for n in range(self.group_size))
        return await asyncio.gather(*map(self.one, leases))

    async def batch(self, step: int) -> Batch:
        """Groups for step + 1; those without signal are replaced when the configuration says so."""
        groups: list[list[Trajectory]] = []
        wanted = self.config.replay.groups_per_step
        while len(groups) < wanted:
            chosen = [self.questions.next() for _ in range(wanted - len(groups))]
            for group in await asyncio.gather(*map(self.group, chosen)):
                if len({t.reward for t in group}) > 1 or not self.config.replay.drop_no_signal:
                    groups.append(group)
        payloads = tuple(tuple(map(encode_trajectory, group)) for group in groups)
        ids, versions = tuple(group[0].group_id for group in groups), (step,) * wanted
        return Batch(step + 1, ids, versions, payloads, {}, {}, ())

    async def evaluate(self) -> dict[str, float]:
        """Exact match over the evaluation questions: greedy, sampled at T = 1, greedy by hops."""
        asked, numbered = self.eval_questions, list(enumerate(self.eval_questions, self.opened + 1))
        self.opened += len(asked)
        greedy, sampled = [
            await asyncio.gather(*(self.one(Lease(n, 0, "eval", q, how)) for n, q in numbered))
            for how in (Sampling(0.0), Sampling(1.0, self.config.seed))
        ]
        scores = {"em": greedy, "sampled_em": sampled}
        for question, trajectory in zip(asked, greedy, strict=True):
            scores.setdefault(f"em_{question.hops}_hops", []).append(trajectory)
        return {name: sum(t.reward or 0.0 for t in ts) / len(ts) for name, ts in scores.items()}


async def push(engine: Engine, policy: VllmPolicy, version: int, folder: Path) -> None:
    """Put the learner's weights into the engine through a file in shared memory."""
    path = folder / "weights.safetensors"
    save_file({name: weight.contiguous() for name, weight in engine.named_weights()}, path)
    await policy.pause()
    await policy.call_workers("load_snapshot", str(path), version)
    await policy.set_policy_version(version)
    await policy.resume()


async def train(config: Config, folder: Path) -> dict[str, float]:
    """Push, evaluate, roll out, update; `learner.total_steps` times. Return the last evaluation."""
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    policy, engine = await VllmPolicy.start(config), Engine(config)
    ema, total = Ema(engine, config.learner.proximal_decay), config.learner.total_steps
    url, limits = retrieval_url(config), config.retrieval
    async with RetrievalClient(url, limits.timeout_s, limits.retries) as retriever:
        rollouts = Rollouts(config, tokenizer, policy=policy, retriever=retriever)
        for step in range(total + 1):
            begun = time.monotonic()
            await push(engine, policy, step, folder)
            if step % config.learner.eval_every == 0 or step == total:
                scores = await rollouts.evaluate()
                print(f"evaluation at step {step}: {scores}", flush=True)
            if step < total:
                batch = batches.build(await rollouts.batch(step), config.learner)
                rolled = time.monotonic()
                loss = update(engine, ema, batch, config.learner)["learner/loss"]
                updated = time.monotonic()
                seconds = f"rollouts {rolled - begun:.2f} s  update {updated - rolled:.2f} s"
                print(f"step {step + 1}/{total}  loss {loss:+.3f}  {seconds}", flush=True)
    checkpoint.save(config.run_dir, total, engine, ema, tokenizer)
    policy.close()
    return scores


def main() -> int:
    """Check, start the retrieval server, train; exit code 2 on bad input."""
    try:
        config = launch.checked(sys.argv[1], sys.argv[2:])
    except (ConfigError, IndexError) as error:
        print(f"train_sync CONFIG [a.b=c ...]: {error}", file=sys.stderr)
        return 2
    begin("train_sync", config.learner.threads)
    path = Path(config.run_dir) / "config.yaml"
    path.parent.mkdir(parents=True)
    save(config, path)
    server = [sys.executable, "-m", "retrieval_server.worker", str(path)]
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        subprocess.Popen(server) as retrieval,
    ):
        try:
            scores = asyncio.run(train(config, Path(folder)))
        finally:
            retrieval.terminate()
    path.with_name("summary.json").write_text(json.dumps(scores, indent=2) + "\n")
    return 0


if __name__ == "__mp_main__":
    die_with_parent()  # vLLM's engine child imports this file under that name
if __name__ == "__main__":
    sys.exit(main())

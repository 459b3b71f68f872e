"""The whole algorithm in one process beside vLLM's engine child: no replay, no broadcast.

Rollouts, update and evaluation take turns; weights go into the engine through a safetensors file in
shared memory. For debuggers, and the synchronous baseline: rollouts, objective, EMA and optimiser
are the asynchronous run's own code. `scripts/train_sync.py CONFIG [a.b=c ...]`
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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

    def __init__(self, config: Config, policy: VllmPolicy, retriever: RetrievalClient) -> None:
        self.config = config
        self.questions = Questions(load_questions(config.questions.train), config.seed)
        self.eval_questions = load_questions(config.questions.eval, config.questions.eval_limit)
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        prompter = Prompter(tokenizer, config.questions, config.actors)
        self.parts = {"policy": policy, "retriever": retriever, "prompter": prompter}
        self.slots = asyncio.Semaphore(config.actors.rollouts_in_flight * config.actors.count)
        self.opened = 0

    async def one(self, lease: Lease) -> Trajectory:
        """One rollout, when a slot is free."""
        async with self.slots, asyncio.timeout(self.config.actors.rollout_deadline_s):
            return await rollout(lease, config=self.config, actor_id="sync", **self.parts)

    async def group(self, question: Question) -> list[Trajectory]:
        """Every sibling of the next group, which asks `question`."""
        self.opened += 1
        how = Sampling(self.config.actors.temperature, self.config.seed)
        siblings = range(self.config.replay.group_size)
        leases = [Lease(self.opened, sibling, "train", question, how) for sibling in siblings]
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
        ids = tuple(group[0].group_id for group in groups)
        return Batch(step + 1, ids, (step,) * wanted, payloads, {}, {}, ())

    async def evaluate(self) -> dict[str, float]:
        """Exact match over the evaluation questions: greedy, sampled at T = 1, greedy by hops."""
        first, asked = self.opened + 1, self.eval_questions
        self.opened += len(asked)
        greedy, sampled = (
            await asyncio.gather(
                *(
                    self.one(Lease(first + row, sibling, "eval", question, how))
                    for row, question in enumerate(asked)
                )
            )
            for sibling, how in enumerate((Sampling(0.0), Sampling(1.0, self.config.seed)))
        )
        scores = {"em": greedy, "sampled_em": sampled}
        for hops in sorted({question.hops for question in asked}):
            pairs = zip(asked, greedy, strict=True)
            scores[f"em_{hops}_hops"] = [t for question, t in pairs if question.hops == hops]
        return {name: sum(t.reward or 0.0 for t in ts) / len(ts) for name, ts in scores.items()}


async def push(engine: Engine, policy: VllmPolicy, version: int, folder: Path) -> None:
    """Put the learner's weights into the engine through a file in shared memory."""
    path = folder / "weights.safetensors"
    save_file({name: weight.contiguous() for name, weight in engine.named_weights()}, path)
    await policy.pause()
    await policy.call_workers("load_snapshot", str(path), version)
    await policy.set_policy_version(version)
    await policy.resume()


async def train(config: Config, retriever: RetrievalClient, folder: Path) -> dict[str, float]:
    """Take `learner.total_steps` steps; return the last evaluation."""
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    policy = await VllmPolicy.start(config, tokenizer)
    engine = Engine(config, config.model.path)
    ema = Ema(engine, config.learner.proximal_decay)
    rollouts = Rollouts(config, policy, retriever)
    total, every = config.learner.total_steps, config.learner.eval_every
    gauges: dict[str, float] = {}
    for step in range(total + 1):
        begun = time.monotonic()
        await push(engine, policy, step, folder)
        if step % every == 0 or step == total:
            scores = await rollouts.evaluate()
            print(f"evaluation at step {step}: {scores}", flush=True)
        if step < total:
            batch = batches.build(await rollouts.batch(step), config.learner)
            rolled_s = time.monotonic() - begun
            gauges = update(engine, ema, batch, config.learner)
            print(
                f"step {step + 1}/{total}  loss {gauges['learner/loss']:+.3f}  rollouts "
                f"{rolled_s:.2f} s  "
                f"all {time.monotonic() - begun:.2f} s  {rollouts.opened} groups opened",
                flush=True,
            )
    checkpoint.save(config.run_dir, total, engine, ema, tokenizer)
    policy.close()
    return scores


async def connected(config: Config, folder: Path) -> dict[str, float]:
    """Train with a retrieval client that is closed at the end."""
    limits = config.retrieval
    async with RetrievalClient(
        retrieval_url(config), limits.timeout_s, limits.retries, limits.max_connections
    ) as retriever:
        return await train(config, retriever, folder)


def main() -> int:
    """Check, start the retrieval server, train; exit code 2 on bad input."""
    try:
        config = launch.checked(sys.argv[1], sys.argv[2:])
    except (ConfigError, IndexError) as error:
        print(f"train_sync CONFIG [a.b=c ...]: {error}", file=sys.stderr)
        return 2
    begin("train_sync", config.learner.threads)
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True)
    save(config, run_dir / "config.yaml")
    server = [sys.executable, "-m", "retrieval_server.worker", str(run_dir / "config.yaml")]
    retrieval = None if config.retrieval.url else subprocess.Popen(server)
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            scores = asyncio.run(connected(config, Path(folder)))
    finally:
        if retrieval:
            retrieval.terminate()
            retrieval.wait(10)
    (run_dir / "summary.json").write_text(json.dumps(scores, indent=2) + "\n")
    return 0


if __name__ == "__mp_main__":
    die_with_parent()  # vLLM's engine child imports this file under that name
if __name__ == "__main__":
    sys.exit(main())

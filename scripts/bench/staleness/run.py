"""One run of the demo task in one process, on trajectories exactly k updates old.

The rollouts, environment, reward, batches, update and engine are those of an asynchronous run; only
the wiring is this file's.
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from actors.policies.transformers import TransformersPolicy, multiply_head
from actors.prompt import load_tokenizer
from configs.load import load
from configs.runtime.files import MOST_IDS, write_durably
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from learner import batch as batches
from learner.errors import Diverged
from learner.model.scorer import load_model
from learner.trainer import Trainer
from scripts.bench.harness import digest_of, sources
from scripts.bench.staleness.rollouts import Rollouts

COLLAPSED_BELOW = 0.05  # sampled EM over both hops
SAY_EVERY = 5  # evaluations
USED = (  # the code that can change a run's figures
    "actors.answers",
    "actors.environments",
    "actors.policies",
    "actors.prompt",
    "actors.rollout",
    "learner.algorithm",
    "learner.batch",
    "learner.health",
    "learner.model",
    "learner.packing",
    "learner.trainer",
    "learner.update",
    "replay.questions",
    "retrieval_server.corpus",
    "retrieval_server.index.bm25",
    "scripts.bench.staleness.rollouts",
    "scripts.bench.staleness.run",
)
GAUGES = {
    "ess": "learner/current_ess",  # of current over behaviour: the same for every variant
    "largest_ratio": "learner/current_ratio_max",
    "clipped": "learner/clip_fraction",
    "grad_norm": "learner/grad_norm",
}


@dataclass(frozen=True)
class Job:
    """One run: `overrides` of configs/demo.yaml, how old its data are, and its seed."""

    overrides: tuple[str, ...]
    staleness: int
    seed: int
    eval_every: int

    @property
    def config(self) -> Config:
        """The whole configuration."""
        return load(
            REPOSITORY / "configs" / "demo.yaml",
            [*self.overrides, f"seed={self.seed}", "learner.zero_stage=0"],
        )

    @property
    def name(self) -> str:
        """A digest of code, configuration and files: runs of equal names compute the same."""
        config, files = self.config, Path(self.config.model.path).parent.name
        questions = msgspec.structs.replace(config.questions, train="", eval="")
        model = msgspec.structs.replace(config.model, path=files)
        replay = [config.replay.groups_per_step, config.replay.group_size]
        replay += [config.replay.drop_no_signal]
        sections = [config.learner, config.actors, replay, config.retrieval.top_k]
        settings = msgspec.to_builtins([*sections, questions, model, self.eval_every, _code()])
        text = json.dumps(settings, sort_keys=True).encode()
        digest = hashlib.blake2b(text, digest_size=5).hexdigest()
        return f"k{self.staleness}-seed{self.seed}-{digest}"


@cache
def _code() -> str:
    return digest_of(sources(*USED))


class StaleRun:
    """Training in which update u learns from the weights of version max(0, u − 1 − k)."""

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        tokenizer = load_tokenizer(self.config.model.path)
        model = multiply_head(load_model(self.config.model), self.config.model.head_dtype)
        policy = TransformersPolicy(model, tokenizer)
        self.rollouts = Rollouts(self.config, policy, tokenizer)
        self.trainer = Trainer(self.config)
        # Versions u − 1 − k … u − 1 before update u; the oldest is what samples.
        self.past = deque([(0, self._snapshot())], maxlen=job.staleness + 1)
        self.updates: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []

    def step(self) -> None:
        """One update on data of exactly the age asked for. Raises Diverged."""
        step, learner = len(self.updates) + 1, self.config.learner
        version, weights = self.past[0]
        self.rollouts.policy.load(weights, version)
        batch, reward = self.rollouts.batch(step)
        row = {"update": step, "version": version, "reward": reward, "groups": 0}
        if batch is not None:
            training = batches.build(batch, learner, vocabulary=MOST_IDS)
            gauges = self.trainer.learn([training])
            row["groups"] = len(batch.groups)
            row |= {name: gauges[key] for name, key in GAUGES.items() if key in gauges}
        self.updates.append(row)
        self.past.append((step, self._snapshot()))

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights."""
        version, weights = self.past[-1]
        self.rollouts.policy.load(weights, version)
        scores = {"update": float(version)} | self.rollouts.evaluate(version)
        self.evaluations.append(scores)
        return scores

    @property
    def collapsed(self) -> bool:
        """True when nothing can bring the policy back: it, and those whose data are still to come,
        have stopped answering (two evaluations), after answering better.
        """
        low = [scores["sampled"] < COLLAPSED_BELOW for scores in self.evaluations]
        answered = not all(low)
        starved = self.updates[-1]["reward"] < COLLAPSED_BELOW if self.updates else False
        return answered and len(low) > 2 and low[-1] and low[-2] and starved

    def close(self) -> None:
        """Release the engines, so that others may be made."""
        self.trainer.close()

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.trainer.named_weights()}


def work(job: Job, label: str, deadline: float, folder: str) -> str:
    """Make the run, keep its record; the line about it, empty past `deadline` (time.time())."""
    torch.set_num_threads(1)
    disable_progress_bar()
    if time.time() > deadline - 0.5 * _typical.get("seconds", 0.0):
        return ""
    record = play(job, label, deadline, lambda line: print(f"    {line}", flush=True))
    if record is None:
        return ""
    _typical["seconds"] = record["seconds"]
    write_durably(Path(folder) / f"{job.name}.json", json.dumps(record).encode())
    end = "  COLLAPSED" if record["collapsed"] else ""
    took = f"{len(record['updates'])} updates, {record['seconds']:.0f} s"
    return f"{label}: {took}, {_em(record['evaluations'][-1])}{end}"


_typical: dict[str, float] = {}  # how long this process's last run took


def play(
    job: Job, label: str, deadline: float, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Make the run and return its record; None when `deadline` (time.time()) cut it off."""
    begun, cpu = time.time(), time.process_time()
    run, total, cause = StaleRun(job), job.config.learner.total_steps, ""
    try:
        while True:
            done = len(run.updates)
            if done % job.eval_every == 0 or done == total:
                scores = run.evaluate()
                if done and done % (SAY_EVERY * job.eval_every) == 0 and done < total:
                    say(f"{label}: update {done}/{total}, {_em(scores)}")
            if done == total or run.collapsed:
                break
            if time.time() > deadline:
                return None
            run.step()
    except Diverged as error:
        cause = str(error)
    finally:
        run.close()
    sampled = [scores["sampled"] for scores in run.evaluations]
    return {
        "name": job.name,
        "staleness": job.staleness,
        "seed": job.seed,
        "overrides": list(job.overrides),
        "collapsed": bool(cause) or (sampled[-1] < COLLAPSED_BELOW <= max(sampled)),
        "cause": cause,
        "seconds": time.time() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "evaluations": run.evaluations,
        "updates": run.updates,
    }


def _em(scores: dict[str, float]) -> str:
    by_hops = "/".join(f"{scores.get(f'sampled_{hops}', 0.0):.2f}" for hops in (1, 2))
    greedy = "/".join(f"{scores.get(f'greedy_{hops}', 0.0):.2f}" for hops in (1, 2))
    return f"sampled {scores['sampled']:.2f} ({by_hops}) greedy {greedy}"

"""What replay and the actors do in a run of one process: whom to ask, and what comes of it.

Consumes questions; produces whole groups, as the batch of a step, and evaluations. Groups have the
ids, and so their tokens the seeds, that they have in a run of many processes which never waits.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.token_audit import TokenAudit
from configs.schema import Config
from replay.codec import encode_trajectory
from replay.protocol import Batch, Lease
from replay.question_files import read_questions
from replay.questions import Questions
from replay.records import EVAL_GROUPS
from replay.trajectory import Question, Sampling, Trajectory


class Rollouts:
    """Leases questions and gathers their trajectories, as many at once as the fleet would.

    `parts` are what every rollout works with: policy, retriever, prompter, rewards.
    """

    def __init__(self, config: Config, **parts: Any) -> None:
        self.config, self.parts, self.opened, self.evaluated = config, parts, 1, EVAL_GROUPS
        self.audit = TokenAudit(parts["prompter"], config)
        files = config.questions
        self.questions = Questions(read_questions(files.train).questions, config.seed)
        self.eval_questions = read_questions(files.eval, files.eval_limit).questions
        self.slots = asyncio.Semaphore(config.actors.rollouts_in_flight * config.actors.count)

    async def one(self, lease: Lease) -> Trajectory:
        """One rollout, when a slot is free."""
        async with self.slots, asyncio.timeout(self.config.actors.rollout_deadline_s):
            parts = {"config": self.config, "actor_id": "sync", **self.parts}
            return await self.audit.rollout(lease, **parts)

    async def group(self, question: Question) -> list[Trajectory]:
        """Every sibling of the next group, which asks `question`."""
        group_id, how = self.opened, Sampling(self.config.actors.temperature, self.config.seed)
        self.opened += 1
        siblings = range(self.config.replay.group_size)
        leases = (Lease(group_id, n, "train", question, how) for n in siblings)
        return await asyncio.gather(*map(self.one, leases))

    async def batch(self, step: int) -> Batch:
        """Groups for step + 1; those that nobody could score are replaced, those without signal
        when the configuration says so.
        """
        groups: list[list[Trajectory]] = []
        wanted = self.config.replay.groups_per_step
        while len(groups) < wanted:
            chosen = [self.questions.next() for _ in range(wanted - len(groups))]
            for group in await asyncio.gather(*map(self.group, chosen)):
                needed = 1 + self.config.replay.drop_no_signal
                if len({t.reward for t in group} - {None}) >= needed:
                    groups.append(group)
        payloads = tuple(tuple(map(encode_trajectory, group)) for group in groups)
        ids, versions = tuple(group[0].group_id for group in groups), (step,) * wanted
        return Batch(step + 1, ids, versions, payloads, {}, {}, ())

    async def evaluate(self) -> dict[str, float]:
        """Exact match over the evaluation questions: greedy, sampled at T = 1, greedy by hops."""
        leases = [
            Lease(group_id, n, "eval", question, Sampling(float(n), self.config.seed))
            for n in range(2)
            for group_id, question in enumerate(self.eval_questions, self.evaluated)
        ]
        self.evaluated += (count := len(self.eval_questions))
        rewards = [t.reward for t in await asyncio.gather(*map(self.one, leases))]
        scores = {"em": rewards[:count], "sampled_em": rewards[count:]}
        for question, reward in zip(self.eval_questions, rewards, strict=False):
            scores.setdefault(f"em_{question.hops}_hops", []).append(reward)
        return {name: _mean(found) for name, found in scores.items()}


def _mean(rewards: Sequence[float | None]) -> float:
    """Of the scorable ones; 0 without any."""
    found = [reward for reward in rewards if reward is not None]
    return sum(found) / len(found) if found else 0.0

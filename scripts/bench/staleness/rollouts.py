"""The actors' side of `forage bench staleness`, in the learner's process: no engine, no server."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from actors.policies.transformers import TransformersPolicy
from actors.prompt import Prompter
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from configs.schema import Config
from replay.codec import encode_trajectory
from replay.protocol import Batch, Lease
from replay.questions import Questions, load_questions
from replay.trajectory import Sampling, Trajectory
from retrieval_server.corpus import load_corpus
from retrieval_server.index.bm25 import BM25Index
from retrieval_server.protocol import Passage

MOST_OPENED = 1.5  # groups per wanted one, in search of groups with signal
EVAL_GROUPS = 1_000_000  # evaluation's group ids begin above training's


class LocalRetriever:
    """The retrieval server's index without the server; remembers what it was asked."""

    def __init__(self, corpus: str) -> None:
        self._documents = load_corpus(corpus)
        self._index = BM25Index([document.contents for document in self._documents])
        self._known: dict[tuple[str, int], list[Passage]] = {}

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Per query at most `top_k` passages, best first."""
        return [self._passages(query, top_k) for query in queries]

    def _passages(self, query: str, top_k: int) -> list[Passage]:
        if (query, top_k) not in self._known:
            (hits,) = self._index.search([query], top_k)
            found = [(self._documents[hit.position], hit.score) for hit in hits]
            self._known[query, top_k] = [Passage(str(d.id), d.contents, s) for d, s in found]
        return self._known[query, top_k]


class Rollouts:
    """The actors' side: groups and evaluations under whatever weights the policy holds."""

    def __init__(self, config: Config, policy: TransformersPolicy, tokenizer: Any) -> None:
        self.config, self.policy = config, policy
        self._retriever = LocalRetriever(config.retrieval.corpus)
        self._prompter = Prompter(tokenizer, config.questions, config.actors)
        files = config.questions
        train = load_questions(files.train, columns=files.columns)
        self._questions = Questions(train, config.seed)
        self._eval = load_questions(files.eval, files.eval_limit, files.columns)
        self._opened, self._signal_rate = 0, 1.0

    def batch(self, step: int) -> tuple[Batch | None, float]:
        """Step's groups and the mean reward of all that was rolled out for it. Groups without
        signal are replaced while at most MOST_OPENED times as many are opened; None when no group
        has any.
        """
        wanted, version = self.config.replay.groups_per_step, self.policy.version
        most = round(MOST_OPENED * wanted)
        kept: list[list[Trajectory]] = []
        opened, signals, reward = 0, 0, 0.0
        while len(kept) < wanted and opened < most:
            # Mostly all at once: a batch costs little more than a part of it.
            count = round(1.2 * (wanted - len(kept)) / max(self._signal_rate, 0.1)) + 1
            groups = self._groups(min(count, most - opened))
            opened += len(groups)
            reward += sum((t.reward or 0.0) / len(group) for group in groups for t in group)
            useful = [group for group in groups if len({t.reward for t in group}) > 1]
            signals += len(useful)
            kept += useful if self.config.replay.drop_no_signal else groups
        self._signal_rate = signals / opened
        if not kept:
            return None, reward / opened
        kept = kept[:wanted]
        payloads = tuple(tuple(map(encode_trajectory, group)) for group in kept)
        ids, versions = tuple(group[0].group_id for group in kept), (version,) * len(kept)
        return Batch(step, ids, versions, payloads, {}, {}, ()), reward / opened

    def evaluate(self, step: int) -> dict[str, float]:
        """Exact match on held-out questions: sampled at T = 1 and greedy, over all and by hops."""
        base, asked = EVAL_GROUPS * (step + 1), self._eval
        sampled = [
            Lease(base + n, 0, "eval", question, Sampling(1.0, self.config.seed))
            for n, question in enumerate(asked)
        ]
        greedy = [
            Lease(base + n, 1, "eval", question, Sampling(0.0)) for n, question in enumerate(asked)
        ]
        done = self._roll([*sampled, *greedy])
        scores: dict[str, list[float]] = {}
        for number, (question, trajectory) in enumerate(zip([*asked, *asked], done, strict=True)):
            name = "sampled" if number < len(asked) else "greedy"
            for key in (name, f"{name}_{question.hops}"):
                scores.setdefault(key, []).append(trajectory.reward or 0.0)
        searches = [trajectory.search_count for trajectory in done[: len(asked)]]
        means = {name: sum(values) / len(values) for name, values in scores.items()}
        return means | {"searches": sum(searches) / len(searches)}

    def _groups(self, count: int) -> list[list[Trajectory]]:
        size, how = self.config.replay.group_size, Sampling(1.0, self.config.seed)
        leases: list[Lease] = []
        for question in [self._questions.next() for _ in range(count)]:
            self._opened += 1
            leases += (Lease(self._opened, n, "train", question, how) for n in range(size))
        done = self._roll(leases)
        return [done[start : start + size] for start in range(0, len(done), size)]

    def _roll(self, leases: Sequence[Lease]) -> list[Trajectory]:
        async def together() -> list[Trajectory]:
            async with Rewards.open(self.config) as rewards:
                one = partial(
                    rollout,
                    policy=self.policy,
                    retriever=self._retriever,
                    prompter=self._prompter,
                    rewards=rewards,
                    config=self.config,
                    actor_id="bench",
                )
                return await asyncio.gather(*map(one, leases))

        return asyncio.run(together())

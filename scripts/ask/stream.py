"""The rollout of a question, reported to a view while it happens.

Loop, environment and prompts are those of training: policy and retriever are wrapped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from actors.environments.base import Retriever
from actors.policies.base import Completion, Policy, SamplingParams
from actors.prompt import Prompter
from actors.rewards.scorer import Rewards, Score
from actors.rollout import rollout
from configs.rewards import RewardsConfig
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, Trajectory
from retrieval_server.protocol import Passage

_HALF = "\ufffd"  # what decoding makes of a character whose other tokens are still to come


class View:
    """The listener of a rollout: said, finished, then found or read, and again; at the end answered
    or failed. Each method does nothing unless it is overridden.
    """

    def said(self, text: str) -> None:
        """Called with each piece of text that the policy samples."""

    def finished(self) -> None:
        """Called when the policy has finished its turn, or was cut off."""

    def found(self, query: str, passages: Sequence[Passage]) -> None:
        """Called with the passages of a search, best first."""

    def read(self, text: str) -> None:
        """Called with an observation without passages: a correction, or a tool's result."""

    def answered(self, question: str, trajectory: Trajectory, passages: Iterable[Passage]) -> None:
        """Called when the rollout has ended; `passages`: all that its searches brought."""

    def failed(self, question: str, error: Exception) -> None:
        """Called when the rollout has failed."""


class StreamDecoder:
    """Decodes a stream of tokens: each character once all its tokens are there."""

    def __init__(self, tokenizer: Any, told: Callable[[str], None]) -> None:
        self._tokenizer, self._told = tokenizer, told
        self._ids: list[int] = []
        self._start = self._until = 0  # the piece that was told last: what follows is spaced by it

    def put(self, token: int) -> None:
        """Take one more token; special ones have no text."""
        self._ids.append(token)
        piece = self._new()
        if piece and not piece.endswith(_HALF):
            self._start, self._until = self._until, len(self._ids)
            self._told(piece)

    def end(self) -> None:
        """Tell what is left; begin another completion."""
        if piece := self._new():
            self._told(piece)
        self._ids, self._start, self._until = [], 0, 0

    def _new(self) -> str:
        before = self._decode(self._ids[self._start : self._until])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class ObservedRetriever:
    """A retriever that tells the view what it found, and keeps it."""

    def __init__(self, retriever: Retriever, view: View) -> None:
        self._retriever, self._view = retriever, view
        self.passages: dict[str, Passage] = {}
        self.asked = False  # since the policy's last turn

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Ask for passages."""
        found = await self._retriever.retrieve(queries, top_k)
        self.asked = True
        for query, passages in zip(queries, found, strict=True):
            self.passages.update((passage.id, passage) for passage in passages)
            self._view.found(query, passages)
        return found


@dataclass
class ObservedPolicy:
    """A policy for one rollout: tells the view of turns, and what is read unless searched."""

    policy: Policy
    retriever: ObservedRetriever
    words: StreamDecoder
    decode: Callable[[Sequence[int]], str]
    view: View
    known: int = 0  # tokens of the context after the last turn

    async def complete(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> Completion:
        """Complete exactly `tokens`."""
        if self.known and not self.retriever.asked:
            self.view.read(self.decode(tokens[self.known :]))
        self.retriever.asked = False
        try:
            completion = await self.policy.complete(tokens, **sampling)
        finally:
            self.words.end()
            self.view.finished()
        self.known = len(tokens) + len(completion.tokens)
        return completion


class Unscored(Rewards):
    """Rewards for a question without accepted answers: none, and no warning."""

    def __init__(self) -> None:
        super().__init__(RewardsConfig())

    async def score(self, *_: object) -> Score:
        """Nothing."""
        return Score(None, "the question has no accepted answer", {})


@dataclass
class Asker:
    """Asks one question after the other; `words` decodes the tokens of `policy`."""

    config: Config
    policy: Policy
    retriever: Retriever
    prompter: Prompter
    words: StreamDecoder
    view: View
    temperature: float = 0.0
    asked: int = 0

    async def ask(self, text: str) -> Trajectory:
        """Roll the question out. Raises ActorError, RetrievalError."""
        self.asked += 1
        question = Question(f"asked-{self.asked}", text, ())
        retriever = ObservedRetriever(self.retriever, self.view)
        policy = ObservedPolicy(self.policy, retriever, self.words, self.prompter.decode, self.view)
        trajectory = await rollout(
            Lease(self.asked, 0, "eval", question, Sampling(self.temperature, self.config.seed)),
            policy=policy,
            retriever=retriever,
            prompter=self.prompter,
            rewards=Unscored(),
            config=self.config,
            actor_id="ask",
        )
        self.view.answered(text, trajectory, retriever.passages.values())
        return trajectory

"""Scripted policies, a fixed retriever, and one real vLLM engine for the whole session."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.policies.base import Completion, Stops
from actors.prompt import Prompter
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from configs.environment import EnvironmentConfig
from configs.prompts import SEARCH_R1_CORRECTION, SEARCH_R1_PROMPT
from configs.retrieval import RetrievalConfig
from configs.rewards import RewardsConfig
from configs.schema import ActorsConfig, Config, ModelConfig, QuestionsConfig
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, Trajectory
from retrieval_server.protocol import Passage
from tests.byte_level import make_llama_tokenizer, make_qwen_tokenizer

QUESTION = Question("q-1", "what is the mayor of bore ?", ("kelu",))
BYTE_LEVEL_TEXTS = (
    *(SEARCH_R1_PROMPT, SEARCH_R1_CORRECTION) * 3,
    *("<search> mayor of bore </search>\n\n<information>Doc 1(Title: Bore)</information>\n\n",) * 3,
)
PASSAGES = [Passage(f"p{n}", f"the mayor of bore is {word} .", 1.0) for n, word in enumerate("abc")]


@dataclass
class Scripted:
    """Says its texts one after the other; remembers the prompts it was given."""

    tokenizer: Any
    texts: Sequence[str]
    prompts: list[list[int]] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)  # seed, max_tokens
    priorities: list[int] = field(default_factory=list)
    first_token_at: float = 0.0

    async def complete(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> Completion:
        ids = self.tokenizer.encode(self.texts[len(self.prompts)], add_special_tokens=False)
        self.prompts.append(list(tokens))
        self.asked.append((seed, max_tokens))
        self.priorities.append(priority)
        kept = np.asarray(ids[:max_tokens], np.int32)
        numbers = np.arange(len(kept))
        versions = numbers.astype(np.int32) % 3
        logprobs = -numbers.astype(np.float32)
        return Completion(kept, logprobs, versions, "stop", self.first_token_at)


@dataclass
class FixedRetriever:
    """Answers every query with the same passages, or with an error."""

    passages: Sequence[Passage] = tuple(PASSAGES)
    error: Exception | None = None
    queries: list[str] = field(default_factory=list)

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.queries += queries
        if self.error is not None:
            raise self.error
        return [list(self.passages[:top_k]) for _ in queries]


def make_lease(group_id: int = 7, sibling: int = 0, **changes: Any) -> Lease:
    """A lease for the mayor's question."""
    lease = Lease(group_id, sibling, "train", QUESTION, Sampling(1.0, 11))
    return msgspec.structs.replace(lease, **changes)


def make_config(
    max_model_len: int = 200,
    top_k: int = 3,
    environment: EnvironmentConfig | None = None,
    prompt: str = "{question}",
    rewards: RewardsConfig | None = None,
    **actors: Any,
) -> Config:
    """A small configuration for the word tokenizer."""
    settings = {
        "max_turns": 3,
        "max_action_tokens": 16,
        "passage_template": "{text} ",
        "observation_template": " <information> {passages} </information> ",
        "correction": "try again .",
    } | actors
    return Config(
        model=ModelConfig(max_model_len=max_model_len, dtype="float32"),
        questions=QuestionsConfig(prompt=prompt),
        environment=environment or EnvironmentConfig(),
        retrieval=RetrievalConfig(top_k=top_k),
        actors=ActorsConfig(**settings),
        rewards=rewards or RewardsConfig(),
    )


@dataclass
class Stage:
    """Plays scripted texts through the real rollout, environment and prompter."""

    tokenizer: Any
    policy: Scripted = None  # type: ignore[assignment]
    retriever: FixedRetriever = field(default_factory=FixedRetriever)
    first_token_at: float = 0.0

    def prompter(self, config: Config) -> Prompter:
        return Prompter(self.tokenizer, config.questions, config.actors)

    def play(self, *texts: str, lease: Lease | None = None, **config: Any) -> Trajectory:
        return asyncio.run(self.perform(*texts, lease=lease, **config))

    async def perform(self, *texts: str, lease: Lease | None = None, **config: Any) -> Trajectory:
        settings = make_config(**config)
        self.policy = Scripted(self.tokenizer, texts, first_token_at=self.first_token_at)
        async with Rewards.open(settings) as rewards:
            return await rollout(
                lease or make_lease(),
                policy=self.policy,
                retriever=self.retriever,
                prompter=self.prompter(settings),
                rewards=rewards,
                config=settings,
                actor_id="actor-0",
            )


@pytest.fixture
def stage(word_tokenizer: Any) -> Stage:
    """A stage with the word tokenizer."""
    return Stage(word_tokenizer)


@pytest.fixture
def lease_for() -> Callable[..., Lease]:
    """lease_for(group_id, sibling, **changes)."""
    return make_lease


@pytest.fixture
def config_for() -> Callable[..., Config]:
    """config_for(max_model_len, top_k, environment, prompt, rewards, **actors)."""
    return make_config


@pytest.fixture
def scripted() -> type[Scripted]:
    """scripted(tokenizer, texts): a policy that says them."""
    return Scripted


@pytest.fixture(scope="session")
def qwen_tokenizer() -> Any:
    """Byte-level BPE with Qwen2.5's template: tags are several tokens."""
    return make_qwen_tokenizer(BYTE_LEVEL_TEXTS)


@pytest.fixture(scope="session")
def llama_tokenizer() -> Any:
    """Byte-level BPE with Llama 3's template: tags are several tokens, padding is the end token."""
    return make_llama_tokenizer(BYTE_LEVEL_TEXTS)


@pytest.fixture(scope="session")
def demo_tokenizer() -> Any:
    """The demo's own: tags are single tokens."""
    from scripts.demo.tokenizer import make_tokenizer  # slow to import

    return make_tokenizer(512)

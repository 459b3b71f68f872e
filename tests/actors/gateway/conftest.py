"""A gateway in front of a policy that says given texts, and the real client of OpenAI."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from actors.gateway.server import Gateway
from actors.gateway.sessions import Session
from actors.policies.base import Completion, Policy
from actors.prompt import Prompter
from configs.environment import EnvironmentConfig, GatewayConfig, ProgramConfig
from configs.schema import ActorsConfig, Config, ModelConfig
from replay.protocol import Lease
from replay.trajectory import Question, Sampling
from scripts.ask.dry_run import Said
from tests.actors.chats import chat_tokenizer

LEASE = Lease(3, 1, "train", Question("q", "who ?", ("kelu",)), Sampling(1.0, 7))


@dataclass
class Heard:
    """A policy that notes what it is asked, and says the next of its texts."""

    said: Said
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def complete(self, tokens: Any, **sampling: Any) -> Completion:
        self.asked.append({"tokens": tokens, **sampling})
        return await self.said.complete(tokens, **sampling)


async def all_verified(versions: Collection[int]) -> None:
    """Every version has passed."""


@dataclass
class Served:
    """A gateway that runs, one session of it and that session's client."""

    gateway: Gateway
    session: Session
    client: AsyncOpenAI
    policy: Any
    prompter: Prompter
    others: list[AsyncOpenAI] = field(default_factory=list)

    def another(self, key: str) -> AsyncOpenAI:
        """A client with another key."""
        self.others.append(client_of(self.gateway.url, key))
        return self.others[-1]


def client_of(url: str, key: str) -> AsyncOpenAI:
    """OpenAI's client, which reads no certificates: that takes longer than a test."""
    http = httpx.AsyncClient(verify=False)
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)


def config_of(**limits: int) -> Config:
    return Config(
        model=ModelConfig(max_model_len=2000),
        actors=ActorsConfig(max_action_tokens=400, rollout_deadline_s=20.0),
        environment=EnvironmentConfig(gateway=GatewayConfig(**limits)),
    )


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture(scope="session")
def prompter(bpe_tokenizer: Any) -> Prompter:
    config = config_of()
    return Prompter(chat_tokenizer(bpe_tokenizer), config.questions, config.actors)


@pytest.fixture
async def serve(prompter: Prompter) -> AsyncIterator[Serve]:
    """serve(*texts, policy=, verified=, prompter=, limit=…): a policy that says these, one after
    the other."""
    begun: list[Served] = []

    async def make(
        *texts: str, policy: Policy | None = None, verified: Any = all_verified,
        prompter: Prompter = prompter, free: bool = False, deadline_s: float = 60.0, **limits: int,
    ) -> Served:  # fmt: skip
        following = iter(texts)
        policy = policy or Heard(Said(prompter, lambda _: next(following)))
        gateway = await Gateway.start(policy, prompter, config_of(**limits), verified)
        session = gateway.open(LEASE, free=free, deadline_s=deadline_s)
        client = client_of(gateway.url, session.key)
        begun.append(Served(gateway, session, client, policy, prompter))
        return begun[-1]

    yield make
    for each in begun:
        for client in (each.client, *each.others):
            await client.close()
        await each.gateway.close()


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., ProgramConfig]:
    """written(source, **settings): the settings of a command that runs this source."""

    def write(source: str, **settings: Any) -> ProgramConfig:
        path = tmp_path / "agent.py"
        path.write_text(source)
        return ProgramConfig(command=(sys.executable, str(path)), **settings)

    return write


@pytest.fixture
def entered(tmp_path: Path) -> Callable[..., ProgramConfig]:
    """entered(source, **settings): the settings of the function `answer` of this source."""

    def write(source: str, **settings: Any) -> ProgramConfig:
        path = tmp_path / "agent.py"
        path.write_text(source)
        return ProgramConfig(entry_point=f"{path}:answer", **settings)

    return write

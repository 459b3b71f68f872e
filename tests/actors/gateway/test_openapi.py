"""Whatever it is sent, the gateway answers as its OpenAPI document says, and never by a fault."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import schemathesis
from hypothesis import settings
from msgspec.structs import replace
from schemathesis import Case, Response
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from actors.gateway.app import create_app
from actors.gateway.endpoints import Endpoints
from actors.gateway.searches import SessionSearches
from actors.gateway.server import Gateway
from actors.gateway.sessions import Session
from actors.prompt import Prompter
from configs.environment import GatewayConfig
from configs.schema import Config
from scripts.ask.dry_run import Said
from tests.actors.conftest import FixedRetriever
from tests.actors.gateway.conftest import LEASE, all_verified, config_of

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
FEW = GatewayConfig(calls=2, searches=2, body_bytes=400)
repeatable = settings(max_examples=25, derandomize=True)
narrowly = settings(repeatable, max_examples=5)
at_length = settings(repeatable, max_examples=1000)
document = create_app(Endpoints.__new__(Endpoints)).openapi()  # it tells of nobody's sessions
schema = schemathesis.openapi.from_dict(document)


@dataclass
class Fuzzed:
    """A gateway that runs on a thread, and how to have sessions of it."""

    gateway: Gateway
    loop: asyncio.AbstractEventLoop

    def opened(self, *, free: bool) -> Session:
        """A session with something to search."""

        async def begin() -> Session:
            session = self.gateway.open(LEASE, free=free)
            session.searches = SessionSearches(FixedRetriever(), top_k=2)
            return session

        return asyncio.run_coroutine_threadsafe(begin(), self.loop).result()

    def answered(self, case: Case, key: str) -> Response:
        """The reply to a case, which is as documented."""
        headers = {"authorization": f"Bearer {key}"}
        url = self.gateway.url.removesuffix("/v1")
        return case.call_and_validate(url, headers=headers, checks=CHECKS)


@contextmanager
def fuzzed(prompter: Prompter, config: Config) -> Iterator[Fuzzed]:
    policy = Said(prompter, lambda _: 'kelu <tool_call>{"name": "a", "arguments": {}}</tool_call>')
    with asyncio.Runner() as runner:
        thread = ThreadPoolExecutor(1)

        async def begin() -> Gateway:
            return await Gateway.start(policy, prompter, config, all_verified)

        gateway = thread.submit(runner.run, begin()).result()
        over = asyncio.Event()
        serving = thread.submit(runner.run, over.wait())
        yield Fuzzed(gateway, runner.get_loop())
        runner.get_loop().call_soon_threadsafe(over.set)
        serving.result()
        thread.submit(runner.run, gateway.close()).result()
        thread.submit(runner.close).result()


@pytest.fixture(scope="module")
def by_hand(prompter: Prompter) -> Iterator[tuple[Fuzzed, str]]:
    """A gateway, and the key of a session that may make any number of calls."""
    with fuzzed(prompter, config_of()) as served:
        yield served, served.opened(free=True).key


@pytest.fixture(scope="module")
def of_leases(prompter: Prompter) -> Iterator[tuple[Fuzzed, list[str]]]:
    """A gateway with narrow limits; keys of a session that is open, of one that has ended, and of
    none.
    """
    config = config_of()
    narrow = replace(config, environment=replace(config.environment, gateway=FEW))
    with fuzzed(prompter, narrow) as served:
        mine, other = served.opened(free=False), served.opened(free=False)
        served.loop.call_soon_threadsafe(other.close)
        yield served, [mine.key, other.key, "made up"]


@pytest.mark.slow
@schema.parametrize()
@repeatable
def test_every_reply_is_as_documented(case: Case, by_hand: tuple[Fuzzed, str]) -> None:
    served, key = by_hand
    served.answered(case, key)


@pytest.mark.slow
@schema.parametrize()
@narrowly
def test_every_refusal_is_as_documented(case: Case, of_leases: tuple[Fuzzed, list[str]]) -> None:
    served, keys = of_leases
    for key, status in zip(keys, (None, 410, 401), strict=True):
        reply = served.answered(case, key)
        if "authorization" not in reply.request.headers:  # some cases leave it out
            assert reply.status_code in (401, 404, 405)
        elif status is not None:
            assert reply.status_code in (status, 404, 405)


@pytest.mark.slow
@pytest.mark.soak("examples")
@schema.parametrize()
@at_length
def test_every_reply_is_as_documented_at_length(case: Case, by_hand: tuple[Fuzzed, str]) -> None:
    served, key = by_hand
    served.answered(case, key)

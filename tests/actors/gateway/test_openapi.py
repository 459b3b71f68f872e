"""Whatever it is sent, the gateway answers as its OpenAPI document says, and never by a fault."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import schemathesis
from hypothesis import settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from actors.gateway.app import create_app
from actors.gateway.endpoints import Endpoints
from actors.gateway.searches import SessionSearches
from actors.gateway.server import Gateway
from actors.prompt import Prompter
from scripts.ask.dry_run import Said
from tests.actors.conftest import FixedRetriever
from tests.actors.gateway.conftest import LEASE, all_verified, config_of

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
repeatable = settings(max_examples=25, derandomize=True)
at_length = settings(repeatable, max_examples=1000)
document = create_app(Endpoints.__new__(Endpoints)).openapi()  # it tells of nobody's sessions
schema = schemathesis.openapi.from_dict(document)


@pytest.fixture(scope="module")
def served(prompter: Prompter) -> Iterator[tuple[str, str]]:
    """The URL of a gateway that runs on a thread, and the key of a session."""
    policy = Said(prompter, lambda _: 'kelu <tool_call>{"name": "a", "arguments": {}}</tool_call>')
    with asyncio.Runner() as runner:
        thread = ThreadPoolExecutor(1)

        async def begin() -> Gateway:
            return await Gateway.start(policy, prompter, config_of(), all_verified)

        gateway = thread.submit(runner.run, begin()).result()
        over = asyncio.Event()
        serving = thread.submit(runner.run, over.wait())
        session = gateway.open(LEASE, free=True)
        session.searches = SessionSearches(FixedRetriever(), top_k=2)
        yield gateway.url.removesuffix("/v1"), session.key
        runner.get_loop().call_soon_threadsafe(over.set)
        serving.result()
        thread.submit(runner.run, gateway.close()).result()
        thread.submit(runner.close).result()


def answered(case: Case, served: tuple[str, str]) -> None:
    url, key = served
    headers = {"authorization": f"Bearer {key}"}
    case.call_and_validate(url, headers=headers, checks=CHECKS)


@pytest.mark.slow
@schema.parametrize()
@repeatable
def test_every_reply_is_as_documented(case: Case, served: tuple[str, str]) -> None:
    answered(case, served)


@pytest.mark.slow
@pytest.mark.soak("examples")
@schema.parametrize()
@at_length
def test_every_reply_is_as_documented_at_length(case: Case, served: tuple[str, str]) -> None:
    answered(case, served)

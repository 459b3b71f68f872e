"""The server keeps what its OpenAPI document says, whatever it is sent."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import assume, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error

from retrieval_server.app.app import Limits, create_app
from retrieval_server.index.bm25 import BM25Index
from retrieval_server.protocol import Document
from tests.retrieval_server.conftest import serving

repeatable = settings(max_examples=15, derandomize=True)
at_length = settings(repeatable, max_examples=1000)


def document(token: str) -> Any:
    """The document of a server with this token."""
    app = create_app([Document("a", "b")], BM25Index(["b"]), token=token)
    return schemathesis.openapi.from_dict(app.openapi())


free, guarded = document(""), document("sesame-12")


def judged(case: Case) -> Case:
    """A distinction of the document: to JSON Schema 3.0 is an integer, to the server not."""
    if isinstance(case.body, dict):
        assume(not isinstance(case.body.get("topk"), float))
    return case


@pytest.fixture(scope="module")
def late_url() -> Iterator[str]:
    """A server that finds nothing in time."""
    with serving(limits=Limits(deadline_s=0.0)) as url:
        yield url


@free.parametrize()
@repeatable
def test_every_reply_is_as_documented(case: Case, server_url: str) -> None:
    judged(case).call_and_validate(server_url)


@guarded.parametrize()
@repeatable
def test_every_reply_to_who_shows_the_token_is(case: Case, guarded_url: str) -> None:
    """And without the token, or with another, what needs it is refused."""
    shown = {"Authorization": "Bearer sesame-12"}
    judged(case).call_and_validate(guarded_url, headers=shown)


@free.include(path="/retrieve").parametrize()
@repeatable
def test_a_server_that_is_late_says_so_as_documented(case: Case, late_url: str) -> None:
    reply = judged(case).call_and_validate(late_url, excluded_checks=[not_a_server_error])
    assert reply.status_code in (200, 405, 422, 503)


@pytest.mark.slow
@pytest.mark.soak("examples")
@free.parametrize()
@at_length
def test_every_reply_is_as_documented_at_length(case: Case, server_url: str) -> None:
    judged(case).call_and_validate(server_url)

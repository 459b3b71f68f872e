"""The wire, exactly as Search-R1's clients use it, and what is refused."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from retrieval_server.app.app import Limits
from retrieval_server.index.base import Hit
from retrieval_server.index.bm25 import BM25Index
from retrieval_server.protocol import (
    DEADLINE,
    MAX_BODY_BYTES,
    MAX_QUERIES,
    MAX_QUERY_CHARS,
    MAX_TOP_K,
    CorpusError,
)
from tests.retrieval_server.conftest import CONTENTS


def _post(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/retrieve", json=body, trust_env=False)


def test_with_scores_as_search_r1_asks(server_url: str) -> None:
    reply = _post(server_url, queries=["mayor of bore"], topk=3, return_scores=True)
    [row] = reply.json()["result"]
    assert list(reply.json()) == ["result"]
    assert row[0]["document"]["contents"].split("\n") == [
        '"mayor of bore"',
        "the mayor of bore is kelu .",
    ]
    assert [set(hit) for hit in row] == [{"document", "score"}] * 3
    assert [hit["document"]["id"] for hit in row] == ["p0", "p3", "p1"]
    assert sorted((hit["score"] for hit in row), reverse=True) == [hit["score"] for hit in row]


def test_without_scores_documents_stand_bare(server_url: str) -> None:
    reply = _post(server_url, queries=["kelu", "tapo"], topk=1)
    assert reply.json() == {
        "result": [
            [{"id": "p0", "contents": '"mayor of bore"\nthe mayor of bore is kelu .'}],
            [{"id": "p3", "contents": '"mayor of miro"\nthe mayor of miro is tapo .'}],
        ]
    }


@pytest.mark.parametrize("body", [{}, {"topk": None}])
def test_null_topk_is_the_servers_default(server_url: str, body: dict[str, object]) -> None:
    [row] = _post(server_url, queries=["of"], **body).json()["result"]
    assert len(row) == 2


def test_no_match_and_no_query_are_valid_and_empty(server_url: str) -> None:
    assert _post(server_url, queries=["zzz", ""], topk=3).json() == {"result": [[], []]}
    assert _post(server_url, queries=[]).json() == {"result": []}


def test_more_than_the_corpus_holds_is_everything_that_matches(server_url: str) -> None:
    assert len(_post(server_url, queries=["of"], topk=MAX_TOP_K).json()["result"][0]) == 4


def test_unknown_fields_are_ignored(server_url: str) -> None:
    assert _post(server_url, queries=["kelu"], model="e5").status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"queries": ["a"], "topk": 0}, "$.topk"),
        ({"queries": ["a"], "topk": -1}, "$.topk"),
        ({"queries": ["a"], "topk": MAX_TOP_K + 1}, "$.topk"),
        ({"queries": ["a"], "topk": True}, "$.topk"),
        ({"queries": ["a"], "topk": "3"}, "$.topk"),
        ({"queries": ["a"], "topk": 2.5}, "$.topk"),
        ({"queries": ["a"], "topk": 3.0}, "$.topk"),
        ({"queries": ["a"], "topk": 10**400}, "$.topk"),
        ({"queries": "a"}, "$.queries"),
        ({"queries": 3}, "$.queries"),
        ({"queries": [1]}, "$.queries"),
        ({"queries": [None]}, "$.queries"),
        ({"queries": ["a"] * (MAX_QUERIES + 1)}, "$.queries"),
        ({"queries": ["a" * (MAX_QUERY_CHARS + 1)]}, "$.queries"),
        ({"queries": ["a"], "return_scores": 1}, "$.return_scores"),
        ({"query": "a" * (1 << 20)}, "$.query"),
        ({"queries": None}, "name either `queries` or one `query`"),
        ({"topk": 3}, "name either `queries` or one `query`"),
        ({"queries": ["a"], "query": "a"}, "name either `queries` or one `query`"),
        ({"query": ["a"]}, "$.query"),
        ([], "Expected `object`"),
    ],
)
def test_a_bad_request_is_told_what_is_allowed(server_url: str, body: object, said: str) -> None:
    reply = httpx.post(f"{server_url}/retrieve", json=body, trust_env=False)
    assert reply.status_code == 422
    detail = reply.json()["detail"]
    assert said in detail
    assert f"null or 1 to {MAX_TOP_K}" in detail


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"null", b"queries=a", b'{"queries": ["a"]} x', b'{"queries": [NaN]}'),
        *(b'{"queries": ["\xff"]}', b'{"queries": ["\\ud800"]}', '{"query": "a"}'.encode("utf-16")),
        b'{"queries": ["a"], "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_bytes_that_are_not_our_json_are_refused(server_url: str, content: bytes) -> None:
    reply = httpx.post(f"{server_url}/retrieve", content=content, trust_env=False)
    assert (reply.status_code, reply.headers["content-type"]) == (422, "application/json")
    assert f"null or 1 to {MAX_TOP_K}" in reply.json()["detail"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused(server_url: str, chunked: bool) -> None:
    body = b'{"queries": ["' + b"a" * MAX_BODY_BYTES + b'"]}'
    content = iter([body[: 1 << 20]] * 40) if chunked else body
    reply = httpx.post(f"{server_url}/retrieve", content=content, trust_env=False)
    assert reply.status_code == 413
    assert f"at most {MAX_BODY_BYTES} bytes" in reply.json()["detail"]


def test_concurrent_requests_each_get_their_own_answer(server_url: str) -> None:
    queries = ["kelu", "tapo", "capital", "river"] * 8
    with ThreadPoolExecutor(16) as pool, httpx.Client(trust_env=False) as client:
        body = [{"queries": [query], "topk": 1} for query in queries]
        replies = pool.map(lambda b: client.post(f"{server_url}/retrieve", json=b).json(), body)
        assert [reply["result"][0][0]["id"] for reply in replies] == ["p0", "p3", "p1", "p2"] * 8


def test_health_counts_passages(server_url: str) -> None:
    reply = httpx.get(f"{server_url}/health", trust_env=False)
    assert (reply.status_code, reply.json()) == (200, {"status": "ok", "passages": 4})


def test_one_query_as_skyrl_asks(server_url: str) -> None:
    [[found]] = _post(server_url, query="kelu", topk=1, return_scores=True).json()["result"]
    assert found["document"]["id"] == "p0"


def _get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}/{path}", trust_env=False)


def test_info_says_what_is_served_and_its_version(server_url: str, guarded_url: str) -> None:
    told = _get(server_url, "info").json()
    assert (told["passages"], told["default_top_k"], told["max_top_k"]) == (4, 2, MAX_TOP_K)
    assert told["index"].startswith("bm25 (") and len(told["index_version"]) == 16
    assert _get(guarded_url, "info").json()["index_version"] == told["index_version"]


def test_metrics_are_prometheus_text(serve: Any) -> None:
    with serve() as url:
        assert _get(url, "ready").json() == {"status": "ready"}
        _post(url, queries=["kelu", "tapo"])
        _post(url, queries=["kelu"], topk=0)
        told = _get(url, "metrics")
    assert told.headers["content-type"].startswith("text/plain; version=")
    lines = told.text.splitlines()
    assert 'retrieval_requests_total{status="200"} 1.0' in lines
    assert 'retrieval_requests_total{status="422"} 1.0' in lines
    assert "retrieval_queries_total 2.0" in lines and "retrieval_waiting_queries 0.0" in lines


class Held(BM25Index):
    """Answers when released."""

    def __init__(self) -> None:
        super().__init__(CONTENTS)
        self.release = threading.Event()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        assert self.release.wait(30.0)
        return super().search(queries, top_k)


def _waiting(url: str) -> float:
    lines = _get(url, "metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("retrieval_waiting_q")).split()[1])


def _until(reached: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 20.0
    while not reached():
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def test_more_than_may_wait_is_503_with_the_time_to_come_again(serve: Any) -> None:
    index = Held()
    limits = Limits(waiting_queries=2)
    with serve(index=index, limits=limits) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(_post, url, queries=["kelu"])
        _until(lambda: "retrieval_queries_total 1.0" in _get(url, "metrics").text)
        second = pool.submit(_post, url, queries=["tapo"] * 2)
        _until(lambda: _waiting(url) == 2.0)
        told = _post(url, queries=["river"])
        index.release.set()
        assert [each.result().status_code for each in (first, second)] == [200, 200]
    assert (told.status_code, told.headers["retry-after"]) == (503, "1")
    assert "2 queries are waiting, of at most 2; ask again later" in told.json()["detail"]


def test_what_takes_too_long_is_503(serve: Any) -> None:
    index = Held()
    with serve(index=index, limits=Limits(deadline_s=0.2)) as url:
        told = _post(url, queries=["kelu"])
        index.release.set()
    assert told.status_code == 503 and "not found within 0.2 s" in told.json()["detail"]


def test_a_search_has_as_long_as_its_client_waits(serve: Any) -> None:
    index = Held()
    with serve(index=index, limits=Limits(deadline_s=60.0)) as url:
        body, headers = {"queries": ["kelu"]}, {DEADLINE: "0.2"}
        told = httpx.post(f"{url}/retrieve", json=body, headers=headers, trust_env=False)
        index.release.set()
    assert told.status_code == 503 and "not found within 0.2 s" in told.json()["detail"]


@pytest.mark.parametrize("told", ["soon", "0", "-1", "nan", ""])
def test_a_deadline_that_is_none_is_refused(server_url: str, told: str) -> None:
    body, headers = {"queries": ["kelu"]}, {DEADLINE: told}
    reply = httpx.post(f"{server_url}/retrieve", json=body, headers=headers, trust_env=False)
    assert reply.status_code == 422
    assert f"{DEADLINE}: {told!r} is no number of seconds above 0" in reply.json()["detail"]


def test_nobody_searches_for_a_client_that_has_left(serve: Any) -> None:
    index = Held()
    with serve(index=index) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(_post, url, queries=["kelu"])
        _until(lambda: "retrieval_queries_total 1.0" in _get(url, "metrics").text)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/retrieve", json={"queries": ["tapo"]}, timeout=0.3, trust_env=False)
        _until(lambda: _waiting(url) == 0.0)
        index.release.set()
        assert first.result().status_code == 200
        assert _post(url, queries=["river"]).status_code == 200
        lines = _get(url, "metrics").text.splitlines()
    assert "retrieval_queries_total 2.0" in lines
    assert 'retrieval_requests_total{status="499"} 1.0' in lines


class Slow(BM25Index):
    """Takes 1 ms a query."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        time.sleep(0.001 * len(queries))
        return super().search(queries, top_k)


def test_search_r1s_own_client_is_never_refused_by_a_loaded_server_with_a_long_deadline(
    serve: Any,
) -> None:
    """It tells no deadline, and reads `result` out of whatever comes."""
    with (
        serve(index=Slow(CONTENTS), limits=Limits(deadline_s=60.0)) as url,
        ThreadPoolExecutor(8) as pool,
    ):
        replies = pool.map(lambda n: _post(url, queries=[f"kelu {n}"] * 20, topk=1), range(8))
        assert [len(reply.json()["result"]) for reply in replies] == [20] * 8


def test_the_manual_needs_nothing_from_elsewhere(server_url: str) -> None:
    page = _get(server_url, "docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "POST /retrieve" in page.text and "RetrieveRequest" in page.text
    assert "<script" not in page.text and "//" not in page.text.replace("<!doctype", "")
    assert _get(server_url, "redoc").status_code == 404


class Broken(BM25Index):
    """Cannot be read any more."""

    def __init__(self, error: Exception) -> None:
        super().__init__(CONTENTS)
        self.error = error

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"), [(CorpusError("line 3 is gone"), 503), (KeyError("a bug"), 500)]
)
def test_a_search_that_fails_is_said_and_counted(serve: Any, error: Exception, status: int) -> None:
    with serve(index=Broken(error)) as url:
        told = _post(url, queries=["kelu"])
        lines = _get(url, "metrics").text.splitlines()
    assert told.status_code == status
    assert f'retrieval_requests_total{{status="{status}"}} 1.0' in lines


def test_the_version_changes_with_what_an_index_is_made_of(serve: Any) -> None:
    versions = set()
    for fingerprint in ("", "another encoder"):
        index = BM25Index(CONTENTS)
        index.fingerprint = fingerprint
        with serve(index=index) as url:
            versions.add(_get(url, "info").json()["index_version"])
    assert len(versions) == 2


def test_openapi_describes_the_wire_types(server_url: str) -> None:
    spec = httpx.get(f"{server_url}/openapi.json", trust_env=False).json()
    schemas = spec["components"]["schemas"]
    assert schemas["RetrieveRequest"]["properties"]["queries"]["anyOf"][0]["maxItems"] == (
        MAX_QUERIES
    )
    assert "ScoredDocument" in schemas
    for reference in _references(spec):
        assert reference.removeprefix("#/components/schemas/") in schemas


def _references(node: object) -> list[str]:
    text = json.dumps(node)
    return [part.split('"')[0] for part in text.split('"$ref": "')[1:]]

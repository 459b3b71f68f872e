"""Whoever comes from Search-R1, verl or SkyRL keeps their client, or their server.

Their clients' requests and what they read of the reply, against our server; and our client against
a server that takes and answers what Search-R1's does.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import requests
from blake3 import blake3
from fastapi import FastAPI
from pydantic import BaseModel

from retrieval_server.client import RetrievalClient
from retrieval_server.index.bm25 import BM25Index
from retrieval_server.protocol import RetrievalRefused, RetrievalUnavailable
from tests.retrieval_server.conftest import CONTENTS, running

BORE, _, _, MIRO = CONTENTS
NO_HIT = -3.4028234663852886e38  # what FAISS puts where it finds nothing, beside position -1
JSON_ONLY = {"Content-Type": "application/json", "Accept": "application/json"}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


def title_and_text(hit: dict[str, Any]) -> tuple[str, str]:
    """The parts of a hit as infer.py, generation.py and verl read them."""
    first, *rest = hit["document"]["contents"].split("\n")
    return first, "\n".join(rest)


def search_r1_lines(hits: Sequence[dict[str, Any]]) -> str:
    """Search-R1's `_passages2string`, in infer.py and in search_r1/llm_agent/generation.py."""
    parts = (title_and_text(hit) for hit in hits)
    return "".join(f"Doc {n}(Title: {title}) {text}\n" for n, (title, text) in enumerate(parts, 1))


def infer_py(url: str, query: str) -> str:
    """Search-R1's infer.py, `search`: no time-out, and no look at the status."""
    sent = {"queries": [query], "topk": 3, "return_scores": True}
    return search_r1_lines(requests.post(url, json=sent).json()["result"][0])


def generation_py(url: str, queries: Sequence[str], topk: int) -> list[str]:
    """Search-R1's search_r1/llm_agent/generation.py, `batch_search`: a turn's queries at once."""
    sent = {"queries": queries, "topk": topk, "return_scores": True}
    return [search_r1_lines(hits) for hits in requests.post(url, json=sent).json()["result"]]


def verl(url: str, queries: Sequence[str]) -> tuple[str, int]:
    """verl's verl/tools/utils/search_r1_like_utils.py, `perform_single_search_batch`."""
    sent = {"queries": queries, "topk": 3, "return_scores": True}
    reply = requests.post(url, headers=JSON_ONLY, json=sent, timeout=30)
    assert reply.status_code not in (500, 502, 503, 504)  # which it would retry
    reply.raise_for_status()
    rows = reply.json().get("result", [])
    found = []
    for row in rows:
        parts = (title_and_text(hit) for hit in row)
        shown = (f"Doc {n} (Title: {head})\n{text}\n\n" for n, (head, text) in enumerate(parts, 1))
        found.append("".join(shown).strip())
    return json.dumps({"result": "\n---\n".join(found)}), sum(map(len, rows))


def skyrl(url: str, query: str, field: str) -> str:
    """SkyRL's skyrl-gym/skyrl_gym/tools/search.py, `SearchToolGroup.search`, over a pooled session:
    at first with `queries`, a list of one, later with one `query`.
    """
    sent = {"topk": 3, "return_scores": True}
    sent |= {"query": query.strip()} if field == "query" else {"queries": [query.strip()]}
    with requests.Session() as session:
        session.mount("http://", requests.adapters.HTTPAdapter(256, 256, max_retries=0))
        replies = [session.post(url, headers=JSON_ONLY, json=sent, timeout=30) for _ in range(2)]
    replies[1].raise_for_status()
    [row] = replies[1].json().get("result", [])
    texts = (hit["document"]["contents"].strip() for hit in row)
    return json.dumps({"result": "".join(f"Doc {n}: {text}\n" for n, text in enumerate(texts, 1))})


def test_search_r1s_infer_py(server_url: str) -> None:
    assert infer_py(f"{server_url}/retrieve", " mayor of bore ") == (
        'Doc 1(Title: "mayor of bore") the mayor of bore is kelu .\n'
        'Doc 2(Title: "mayor of miro") the mayor of miro is tapo .\n'
        'Doc 3(Title: "capital of xanu") the capital of xanu is bore .\n'
    )


def test_search_r1s_rollout_loop(server_url: str) -> None:
    """It sends a turn's queries in one POST: many, empty ones, or none when nobody searches."""
    found = generation_py(f"{server_url}/retrieve", ["kelu", "", "tapo"] * 100, 1)
    assert found[:3] == [
        'Doc 1(Title: "mayor of bore") the mayor of bore is kelu .\n',
        "",
        'Doc 1(Title: "mayor of miro") the mayor of miro is tapo .\n',
    ]
    assert found == found[:3] * 100
    assert generation_py(f"{server_url}/retrieve", [], 3) == []


def test_verls_search_tool(server_url: str) -> None:
    said, count = verl(f"{server_url}/retrieve", ["kelu", "nothing such", "tapo"])
    assert json.loads(said)["result"].split("\n---\n") == [
        'Doc 1 (Title: "mayor of bore")\nthe mayor of bore is kelu .',
        "",
        'Doc 1 (Title: "mayor of miro")\nthe mayor of miro is tapo .',
    ]
    assert count == 2


@pytest.mark.parametrize("field", ["queries", "query"])
def test_skyrls_search_tool(server_url: str, field: str) -> None:
    said = skyrl(f"{server_url}/retrieve", " kelu\n", field)
    assert json.loads(said)["result"] == f"Doc 1: {BORE}\n"


class QueryRequest(BaseModel):
    """The request that Search-R1's search_r1/search/retrieval_server.py takes."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


Row = dict[str, Any]


def faiss_rows(ids: Callable[[int], object], query: str, topk: int) -> list[tuple[Row, float]]:
    """Its dense retriever's: rows of the corpus as they are; position -1 is the last of them."""
    [hits] = BM25Index(CONTENTS).search([query], topk)
    found = [(hit.position, hit.score) for hit in hits]
    found += [(-1, NO_HIT)] * (topk - len(found))
    rows = [{"id": ids(n), "contents": contents} for n, contents in enumerate(CONTENTS)]
    return [(rows[position], score) for position, score in found]


def lucene_rows(query: str, topk: int) -> list[tuple[Row, float]]:
    """Its BM25 retriever's, where the index stores the documents: three fields, none the id."""
    [hits] = BM25Index(CONTENTS).search([query], topk)
    parts = [(CONTENTS[hit.position], hit.score) for hit in hits]
    return [
        ({"title": c.split("\n")[0].strip('"'), "text": c.split("\n")[1], "contents": c}, score)
        for c, score in parts
    ]


@contextmanager
def search_r1(search: Callable[[str, int], list[tuple[Row, float]]]) -> Iterator[str]:
    """A server that takes and answers what Search-R1's does, on FastAPI and pydantic like it, with
    a default of 2 passages.
    """
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: QueryRequest) -> dict[str, Any]:
        found = [search(query, request.topk or 2) for query in request.queries]
        if request.return_scores:
            return {"result": [[{"document": d, "score": s} for d, s in row] for row in found]}
        return {"result": [[document for document, _ in row] for row in found]}

    with running(app) as url:
        yield url


def as_strings(query: str, topk: int) -> list[tuple[Row, float]]:
    """wiki-18's ids are strings."""
    return faiss_rows(lambda n: f"p{n}", query, topk)


def as_numbers(query: str, topk: int) -> list[tuple[Row, float]]:
    """Other corpora's are not."""
    return faiss_rows(lambda n: n, query, topk)


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        {"queries": ["mayor of bore", "capital"], "topk": 1},
        {"queries": ["the mayor of"], "topk": None},
        {"queries": ["the mayor of"], "model": "e5"},
        {"queries": []},
    ],
)
def test_our_server_answers_as_search_r1s(
    server_url: str, body: dict[str, object], scores: bool
) -> None:
    with search_r1(as_strings) as theirs:
        ours, other = (
            httpx.post(f"{url}/retrieve", json=body | {"return_scores": scores}, trust_env=False)
            for url in (server_url, theirs)
        )
    assert ours.json() == other.json()
    assert (ours.status_code, ours.headers["content-type"]) == (200, other.headers["content-type"])


@pytest.mark.parametrize(
    ("search", "ids"),
    [
        (as_strings, ["p0", "p3"]),
        (as_numbers, ["0", "3"]),
        (lucene_rows, [f"blake3-{blake3(c.encode()).hexdigest()[:16]}" for c in (BORE, MIRO)]),
    ],
)
async def test_our_client_reads_search_r1s_server(
    search: Callable[[str, int], list[tuple[Row, float]]], ids: list[str]
) -> None:
    with search_r1(search) as url:
        async with RetrievalClient(f"{url}/retrieve") as client:
            first, none, second = await client.retrieve(["mayor of bore", "zzz", "tapo"], 2)
    assert [passage.id for passage in first] == ids and none == []
    assert (first[0].title, first[0].text) == ("mayor of bore", "the mayor of bore is kelu .")
    assert first[0].score > first[1].score > 0
    assert [passage.contents for passage in second] == [MIRO], "what FAISS fills up with is no hit"


async def test_a_request_that_search_r1s_server_does_not_take_is_a_refusal() -> None:
    app = FastAPI()

    class Asked(BaseModel):
        queries: int

    @app.post("/retrieve")
    def retrieve(request: Asked) -> None: ...

    with running(app) as url:
        async with RetrievalClient(url) as client:
            with pytest.raises(RetrievalRefused, match=r"answered 422: .*valid integer"):
                await client.retrieve(["kelu"], 1)


async def test_search_r1s_own_failures_are_retried_and_never_a_result() -> None:
    def broken(query: str, topk: int) -> list[tuple[Row, float]]:
        raise IndexError("an error inside the retriever")

    with search_r1(broken) as url:
        async with RetrievalClient(url, retries=1) as client:
            with pytest.raises(RetrievalUnavailable, match="answered 500: 'Internal Server Error'"):
                await client.retrieve(["kelu"], 1)
    assert client.gauges()["retrieval/retried"] == 1

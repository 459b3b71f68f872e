"""The faulty retrieval server: each fault is what it says, and no passage is made of any."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest

from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import BadReply, RetrievalError
from retrieval_server.protocol import RetrievalOverloaded as Overloaded
from retrieval_server.protocol import RetrievalTimeout as Timeout
from retrieval_server.protocol import RetrievalUnavailable as Unavailable
from tests.faults.retrieval_proxy import FAULTS, MARKER, Dealer, FaultyRetrieval, Manner
from tests.retrieval_server.conftest import serving

BODY = {"queries": ["kelu"], "topk": 1, "return_scores": True}


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """The real server, over p0 to p3."""
    with serving() as url:
        yield url


async def test_without_faults_it_is_the_server_behind_it(server_url: str) -> None:
    async with (
        FaultyRetrieval(f"{server_url}/retrieve", Manner(rate=0.0)) as proxy,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        for method, path, body in (
            ("POST", "/retrieve", BODY),
            ("POST", "/retrieve", {"queries": 3}),
            ("GET", "/info", None),
            ("GET", "/nothing", None),
        ):
            here, there = [
                await client.request(method, url + path, json=body)
                for url in (proxy.url, server_url)
            ]
            assert (here.status_code, here.content) == (there.status_code, there.content)
            for name in ("x-index-version", "content-type"):
                assert here.headers.get(name) == there.headers.get(name)
        told = (await client.get(f"{proxy.url}/faults")).json()
    assert told == {"calls": 2, "faulty": 0, "faults": {}, "rate": 0.0, "seed": 0}


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        pytest.param("no_answer", Timeout, "did not answer within", marks=pytest.mark.slow),
        ("error_500", Unavailable, f"answered 500: .*{MARKER}"),
        ("error_503", Unavailable, f"answered 503: .*{MARKER}"),
        pytest.param("busy_503", Overloaded, f"answered 503: .*{MARKER}", marks=pytest.mark.slow),
        ("too_few_bytes", Unavailable, "RemoteProtocolError: peer closed connection"),
        ("too_many_bytes", BadReply, "JSON|truncated"),
        ("wrong_count", BadReply, "2 results for 1 queries"),
        ("not_json", BadReply, MARKER),
        ("no_result", BadReply, MARKER),
        ("empty", BadReply, "truncated"),
        ("restart", Unavailable, "RemoteProtocolError|ReadError"),
    ],
)
async def test_each_fault_is_an_error_and_then_the_client_works_on(
    server_url: str, fault: str, error: type[RetrievalError], said: str
) -> None:
    manner = Manner(rate=1.0, away_s=0.2, faults=(fault,))
    # Two of them are waited out; the others must not be taken for a timeout on a busy machine.
    timeout_s = {Timeout: 2.0, Overloaded: 3.0}.get(error, 30.0)
    async with (
        FaultyRetrieval(server_url, manner) as proxy,
        RetrievalClient(proxy.url, timeout_s, retries=0) as client,
    ):
        with pytest.raises(error, match=said):
            await client.retrieve(["kelu"], 1)
        proxy.dealer = Dealer(Manner(rate=0.0))
        assert (await client.retrieve(["tapo"], 1))[0][0].id == "p3"


async def test_a_slow_answer_is_a_good_one(server_url: str) -> None:
    clock: Callable[[], float] = asyncio.get_running_loop().time
    manner = Manner(rate=1.0, slow_s=0.5, faults=("slow",))
    async with FaultyRetrieval(server_url, manner) as proxy, RetrievalClient(proxy.url) as client:
        begun = clock()
        assert (await client.retrieve(["kelu"], 1))[0][0].id == "p0"
        assert clock() - begun >= 0.1


def test_faults_come_by_seed_and_rate_each_as_often_as_any_other() -> None:
    dealers = [Dealer(Manner(0.25, seed)) for seed in (7, 7, 8)]
    dealt = [[dealer.deal() for _ in range(4800)] for dealer in dealers]
    assert dealt[0] == dealt[1] != dealt[2]
    assert dealers[0].dealt.total() == pytest.approx(1200, rel=0.1)
    assert set(dealers[0].dealt) == set(FAULTS)
    assert max(dealers[0].dealt.values()) - min(dealers[0].dealt.values()) <= 1


@pytest.mark.slow
async def test_whatever_happens_a_passage_is_the_right_one(server_url: str) -> None:
    """Every other search fails: what is returned all the same is what the query asked for."""
    right = {"kelu": "p0", "tapo": "p3", "capital": "p1", "river": "p2"}
    manner = Manner(rate=0.5, seed=3, slow_s=0.1, away_s=0.1)
    found: Counter[str] = Counter()
    async with FaultyRetrieval(server_url, manner) as proxy:
        async with RetrievalClient(proxy.url, 0.6, retries=2, max_connections=8) as client:

            async def ask(name: str) -> None:
                try:
                    rows = await client.retrieve([name, name], 1)
                    found.update("right" if hit.id == right[name] else hit.id for [hit] in rows)
                except RetrievalError:
                    found["lost"] += 2

            for _ in range(40):
                await asyncio.gather(*map(ask, right))
        assert set(proxy.dealer.dealt) == set(FAULTS)
    assert set(found) <= {"right", "lost"} and found["right"] > 200, found

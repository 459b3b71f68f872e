"""Each provider's answers as passages; what its refusals mean; its key in nothing that is said."""

import json
import time
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from configs.retrieval import LiveConfig
from retrieval_server.app.live.providers import PROVIDERS, Provider, fault, retry_after_s
from retrieval_server.protocol import BadReply, Document
from tests.retrieval_server.app.live.providers_at_home import (
    KEY,
    body,
    exhausted,
    refusal,
    spent,
    throttled,
)

KINDS = sorted(PROVIDERS)


def provider(kind: str, **fields: Any) -> Provider:
    return PROVIDERS[kind](LiveConfig(engine_id="cx1", **fields), KEY)


def sent(kind: str, status: int, content: Any, **headers: float) -> Any:
    return fault(status, headers.get("after_s"), json.dumps(content).encode(), 7.0)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_become_passages_on_two_lines(kind: str) -> None:
    found = provider(kind).documents(json.dumps(body(kind, "q")).encode())
    own = [] if kind == "google_cse" else [found.pop(0)]
    assert [each.contents for each in own] == ["Own\n42"] * len(own)
    assert found == [
        Document("https://example.org/1", "q 1\nsnippet 1 of q"),
        Document("https://example.org/2", "q 2\nsnippet 2 of q"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_without_results_is_an_empty_answer(kind: str) -> None:
    assert provider(kind).documents(json.dumps(body(kind, "nothing")).encode()) == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        *((kind, b"<html>") for kind in KINDS),
        *((kind, b"[1]") for kind in KINDS),
        ("serper", b'{"organic": 1}'),
        ("serpapi", b'{"search_metadata": {"status": "Error"}, "error": "later"}'),
        ("serpapi", b'{"error": "x"}'),
        ("google_cse", b'{"items": []}'),
    ],
)
def test_what_is_no_answer_is_refused_by_name(kind: str, content: bytes) -> None:
    with pytest.raises(BadReply):
        provider(kind).documents(content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_holds_query_places_and_key(kind: str) -> None:
    request = provider(kind, country="us", language="en").request(httpx.AsyncClient(), "who? & why")
    assert "httpx" in request.headers["user-agent"]
    said = dict(request.url.params) if kind != "serper" else json.loads(request.content)
    assert (said["q"], said["gl"], said["hl"], int(said["num"])) == ("who? & why", "us", "en", 10)
    shown = {"serper": "x-api-key", "google_cse": "x-goog-api-key"}
    told = request.headers[shown[kind]] if kind in shown else said["api_key"]
    assert told == KEY and (kind == "serpapi") == (KEY in str(request.url))
    assert kind != "google_cse" or said["cx"] == "cx1"


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_said_again_is_hidden(kind: str) -> None:
    content = json.dumps(refusal(kind, KEY)[2]).encode()
    assert KEY not in repr(provider(kind))
    assert KEY.encode() in content and KEY.encode() not in provider(kind).hidden(content)


@pytest.mark.parametrize("key", [KEY, 'a/b+c="d"&<\'>\\é😀='])
def test_however_it_is_spelt(key: str) -> None:
    asked = PROVIDERS["serpapi"](LiveConfig(), key)
    in_html = "".join(f"\\u{ord(each):04X}" if each in "<>&='" else each for each in key)
    spelt = [
        key,
        quote(key),
        quote(key, safe="").lower(),
        json.dumps(key)[1:-1],
        json.dumps(key, ensure_ascii=False)[1:-1],
        json.dumps(key)[1:-1].replace("/", "\\/"),
        in_html,
    ]
    for each in spelt:
        assert asked.hidden(f'{{"said": "{each}."}}'.encode()) == b'{"said": "...."}'
    assert asked.hidden(b"another") == b"another"


@pytest.mark.parametrize("kind", KINDS)
def test_haste_is_told_from_a_wrong_key(kind: str) -> None:
    limited = sent(kind, 429, throttled(kind)[2])
    assert (limited.after_s, limited.billed, limited.of_the_query) == (7.0, False, False)
    assert sent(kind, 429, throttled(kind)[2], after_s=3.0).after_s == 3.0
    status, _, content = refusal(kind, KEY)
    denied = sent(kind, status, content)
    assert (denied.after_s, denied.billed, denied.of_the_query) == (None, False, False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_account_without_searches_is_told_from_haste(kind: str) -> None:
    status, _, content = spent(kind)
    for after in ({}, {"after_s": 3.0}):
        empty = sent(kind, status, content, **after)
        assert (empty.after_s, empty.billed, empty.of_the_query) == (None, False, False)
        assert empty.said.startswith("see its account")
    assert sent(kind, 403, exhausted("day")).after_s is None
    assert sent(kind, 403, exhausted("minute")).after_s == 7.0
    haste = {"error": "Rate limit: 5 per second, 2500 per day"}
    assert sent(kind, 429, haste, after_s=3.0).after_s == 3.0


def test_a_refused_query_is_told_from_an_empty_purse() -> None:
    assert sent("serpapi", 400, {"error": "Missing query `q` parameter."}).of_the_query
    assert not sent("serper", 400, {"message": "Not enough credits"}).of_the_query
    failed = sent("serper", 502, "bad gateway")
    assert failed.billed and failed.after_s == 7.0
    assert sent("serper", 503, "", after_s=0.0).after_s == 7.0  # it would be paid again at once
    hasty = {"error": {"errors": [{"reason": "rateLimitExceeded"}], "code": 403}}
    assert sent("google_cse", 403, hasty).after_s == 7.0


def test_a_page_without_an_address_is_named_after_its_contents() -> None:
    pages = [{"title": "t", "snippet": "s", "link": "x" * 2000}, {"link": "https://empty"}, {}]
    (found,) = provider("serper").documents(json.dumps({"organic": pages}).encode())
    assert found.contents == "t\ns" and str(found.id).startswith("blake3-")


def test_a_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s("7") == 7.0 and retry_after_s("") is None and retry_after_s("soon") is None
    in_a_minute = retry_after_s(formatdate(time.time() + 60, usegmt=True))
    assert in_a_minute is not None and 57.0 < in_a_minute <= 60.0
    assert retry_after_s(formatdate(time.time() - 60, usegmt=True)) == 0.0
    assert retry_after_s("9" * 40) is None
    in_a_day = formatdate(time.time() + 86_400, usegmt=True)
    assert retry_after_s("999999") == retry_after_s(in_a_day) == 600.0

"""Replies of Search-R1's servers may lack ids, or hold a passage that was not found."""

import httpx
import msgspec
from blake3 import blake3

from retrieval_server.protocol import (
    BadReply,
    Passage,
    RetrievalDenied,
    RetrievalOverloaded,
    RetrievalRefused,
    RetrievalUnavailable,
)

_NO_HIT = -3e38
_OF_THE_REQUEST = (400, 408, 413, 414, 422)  # another one may be answered
_SHOWN_BYTES = 200


class _Document(msgspec.Struct, frozen=True, gc=False):
    """Any server's document."""

    contents: str
    id: str | int | None = None


class _Hit(msgspec.Struct, frozen=True, gc=False):
    document: _Document
    score: float


class _Reply(msgspec.Struct, frozen=True):
    result: list[list[_Hit]]


_decoder = msgspec.json.Decoder(_Reply)


def parse_reply(
    response: httpx.Response, content: bytes, expected: int, url: str
) -> list[list[Passage]]:
    """The `expected` lists of passages in a reply.

    Over a Lucene index, Search-R1's servers send no ids: a passage is then named after its contents
    (`blake3-` and 16 hexadecimal digits). Where FAISS finds too little they send some other passage
    with the lowest float32 as its score: it is left out. Raises RetrievalUnavailable,
    RetrievalRefused or BadReply.
    """
    said = repr(content[:_SHOWN_BYTES].decode(errors="replace"))
    if response.status_code != 200:
        raise _error(response, f"{url} answered {response.status_code}", said)
    try:
        reply = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReply(f"{url}: {error}; body {said}") from error
    if len(reply.result) != expected:
        raise BadReply(f"{url}: {len(reply.result)} results for {expected} queries")
    return [[_passage(hit) for hit in row if hit.score > _NO_HIT] for row in reply.result]


def _error(
    response: httpx.Response, what: str, said: str
) -> RetrievalUnavailable | RetrievalRefused:
    status, after = response.status_code, response.headers.get("retry-after", "")
    if status == 503 and after.isdecimal():
        return RetrievalOverloaded(f"{what}: {said}", float(after))
    if status == 429 or status >= 500:
        return RetrievalUnavailable(f"{what}: {said}")
    if status in _OF_THE_REQUEST:
        return RetrievalRefused(f"{what}: {said}")
    remedy = "see retrieval.url and retrieval.token_file"
    if status == 401:
        remedy = "retrieval.token_file does not hold its token: give a copy of the server's"
    return RetrievalDenied(f"{what}: {remedy}: {said}")


def _passage(hit: _Hit) -> Passage:
    document = hit.document
    name = document.id
    if name is None:
        name = f"blake3-{blake3(document.contents.encode()).hexdigest(length=8)}"
    return Passage(str(name), document.contents, hit.score)

"""One server's HTTP as a client meets it: a POST, and what its reply says.

Whatever is not one list of passages per query is a RetrievalError that names the URL. Replies of
Search-R1's servers may lack ids, or hold a passage that was not found.
"""

import asyncio
import re
import ssl
from typing import NamedTuple

import httpx
import msgspec
from blake3 import blake3

from retrieval_server.protocol import (
    BATCH_QUERIES,
    DEADLINE,
    INDEX_VERSION,
    RETRY_AFTER,
    BadReply,
    Passage,
    RetrievalDenied,
    RetrievalOverloaded,
    RetrievalRefused,
    RetrievalTimeout,
    RetrievalUnavailable,
    RetrievalUnreachable,
)

_COUNT, _SECONDS = re.compile(r"[0-9]{1,6}"), re.compile(r"[0-9]{1,6}\.[0-9]{3}")
CONNECT_S = 2.0  # where other servers could be asked meanwhile
_SHOWN_BYTES = 200  # of a reply, in messages
_NO_HIT = -3e38  # a score at or below this is of a passage that was not found
_OF_THE_REQUEST = (400, 408, 413, 414, 422)  # another one may be answered
# httpx makes one for each connection else, also for plain HTTP, in half a millisecond.
_UNUSED_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Document(msgspec.Struct, frozen=True, gc=False):
    """Any server's document."""

    contents: str
    id: str | int | None = None


class _Hit(msgspec.Struct, frozen=True, gc=False):
    document: _Document
    score: float


class _Results(msgspec.Struct, frozen=True):
    result: list[list[_Hit]]


_decoder = msgspec.json.Decoder(_Results)


class Reply(NamedTuple):
    """A list of passages per query, and the version of the index they are of; "" where unknown."""

    rows: list[list[Passage]]
    version: str


class Poster:
    """POSTs over kept connections, each reused last in, first out.

    One httpx transport a connection: a shared httpx pool looks at all its connections for every
    request, which at 64 of them costs far more than the request. The caller bounds how many are
    used at once.
    """

    def __init__(self, url: str, token: str = "", connect_s: float | None = None) -> None:
        """`url`: the server's base URL, or that of its `/retrieve`. `connect_s`: the deadline of a
        connection, beside that of the request.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"retrieval url must begin with http:// or https://, got {url!r}")
        self._base = url.rstrip("/").removesuffix("/retrieve")
        self.url = httpx.URL(f"{self._base}/retrieve")
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._connect_s = connect_s
        self._extensions = {"timeout": {"connect": connect_s}} if connect_s else {}
        self._tls = httpx.create_ssl_context() if self.url.scheme == "https" else _UNUSED_TLS
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self.batch_queries = 0  # that the last reply asked for in a request; 0: it said nothing

    async def post(self, body: bytes, expected: int, seconds: float) -> Reply:
        """Send one request body; returns `expected` lists, or raises the RetrievalError it met."""
        transport = self._idle.pop() if self._idle else self._connection()
        good = False
        try:
            headers = self._headers | {DEADLINE: f"{seconds:.3f}"}
            request = httpx.Request(
                "POST", self.url, content=body, headers=headers, extensions=self._extensions
            )
            response, content = await self._exchange(transport, request, seconds)
            asked_for = response.headers.get(BATCH_QUERIES, "")
            self.batch_queries = int(asked_for) if _COUNT.fullmatch(asked_for) else 0
            rows = parse_reply(response, content, expected, f"{self.url}")
            good = True
        except RetrievalOverloaded:  # in order; under load, connecting again would add to it
            good = True
            raise
        finally:
            if good:
                self._idle.append(transport)
            else:  # what may still come of a reply cut off, or be left of a bad one, answers nobody
                await transport.aclose()
        return Reply(rows, response.headers.get(INDEX_VERSION, ""))

    async def look(self, path: str, seconds: float) -> tuple[int, bytes]:
        """GET a path over a new connection: status and content, or raises the RetrievalError."""
        transport = self._connection()
        request = httpx.Request("GET", self._base + path, extensions=self._extensions)
        try:
            response, content = await self._exchange(transport, request, seconds)
        finally:
            await transport.aclose()
        return response.status_code, content

    async def _exchange(
        self, transport: httpx.AsyncHTTPTransport, request: httpx.Request, seconds: float
    ) -> tuple[httpx.Response, bytes]:
        try:
            async with asyncio.timeout(seconds):
                response = await transport.handle_async_request(request)
                return response, await response.aread()
        except TimeoutError as error:
            raise RetrievalTimeout(
                f"{request.url} did not answer within {seconds:.3g} s"
            ) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            said = str(error) or f"no connection within {self._connect_s:g} s"
            raise RetrievalUnreachable(f"{request.url}: {type(error).__name__}: {said}") from error
        except httpx.RequestError as error:
            raise RetrievalUnavailable(f"{request.url}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the kept connections."""
        while self._idle:
            await self._idle.pop().aclose()

    def _connection(self) -> httpx.AsyncHTTPTransport:
        # A proxy of the environment must not come between us and a loopback server.
        limits = httpx.Limits(max_connections=1, keepalive_expiry=30.0)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)


def parse_reply(
    response: httpx.Response, content: bytes, expected: int, url: str
) -> list[list[Passage]]:
    """Return the `expected` lists of passages in a reply.

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
    if status == 503 and _COUNT.fullmatch(after):
        exact = response.headers.get(RETRY_AFTER, "")
        after_s = float(exact if _SECONDS.fullmatch(exact) else after)
        return RetrievalOverloaded(f"{what}: {said}", after_s)
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

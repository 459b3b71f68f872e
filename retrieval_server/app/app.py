"""The HTTP application: Search-R1's `POST /retrieve`, and routes for its operators.

`GET /health` (alive), `/ready` (takes searches), `/info` (what is served), `/metrics` (Prometheus),
`/docs` (the manual), `/openapi.json`. Replies are encoded straight from the wire types: FastAPI's
own serialisation costs more than a search does. The index runs on a thread of its own behind a
queue; both live in the lifespan, and so do searches of the live web, which take their place. A
search has `Limits.deadline_s`, or less where its client says so; one that cannot be answered by
then is refused at once, with 503 and Retry-After, and one whose client has gone is dropped.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import msgspec
from blake3 import blake3
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.requests import ClientDisconnect

from retrieval_server.app.live.search import LiveSearch
from retrieval_server.app.manual import render
from retrieval_server.app.metrics import CONTENT_TYPE, Metrics
from retrieval_server.app.queue import SearchQueue
from retrieval_server.auth import authorized
from retrieval_server.corpus import digest_of
from retrieval_server.index.base import Index
from retrieval_server.protocol import (
    ALLOWED,
    BATCH_QUERIES,
    DEADLINE,
    DEFAULT_TOP_K,
    INDEX_VERSION,
    MAX_BODY_BYTES,
    RETRY_AFTER,
    UNAUTHORIZED,
    Document,
    Health,
    Info,
    NotRecorded,
    PlainReply,
    Readiness,
    Refusal,
    RetrievalError,
    RetrievalOverloaded,
    RetrieveRequest,
    ScoredDocument,
    ScoredReply,
)

TITLE = "Forage retrieval server"
MAX_BATCH = 256
CLIENT_GONE = 499  # in the metrics alone: nobody reads it
Rows = list[list[ScoredDocument]]
logger = logging.getLogger("retrieval_server")

_request_decoder = msgspec.json.Decoder(RetrieveRequest)
_encoder = msgspec.json.Encoder()
_schemas, _components = msgspec.json.schema_components(
    [RetrieveRequest, ScoredReply, PlainReply, Health, Readiness, Info, Refusal],
    ref_template="#/components/schemas/{name}",
)
_REQUEST, _SCORED, _PLAIN, _HEALTH, _READY, _INFO, _REFUSAL = _schemas
_components["RetrieveRequest"]["oneOf"] = [
    {"required": [one], "properties": {one: {"type": kind}, other: {"type": "null"}}}
    for one, kind, other in (("queries", "array", "query"), ("query", "string", "queries"))
]


class Limits(msgspec.Struct, frozen=True):
    """The queries that may wait to be searched, and the longest deadline of a search."""

    waiting_queries: int = 8192
    deadline_s: float = 20.0


class Searches(Protocol):
    """What answers: the queue before an index, or the live web."""

    @property
    def waiting(self) -> int:
        """Queries that are not searched for yet."""
        ...

    @property
    def offered(self) -> int:
        """How many queries a request had best hold."""
        ...

    @property
    def backlog_s(self) -> float:
        """Seconds until what is here now has been searched for."""
        ...

    def search(self, queries: Sequence[str], top_k: int, deadline: float) -> asyncio.Future[Rows]:
        """Search, by then (of the monotonic clock)."""
        ...


class _TooLarge(Exception):
    """The body passed MAX_BODY_BYTES."""


class _BadHeader(Exception):
    """A header of ours that says nothing."""


class _Gone(Exception):
    """The client left before it was answered."""


_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _BadHeader)
_FAULTS = (*_MALFORMED, _TooLarge, _Gone, ClientDisconnect)


def _json(schema: dict[str, Any], description: str, **headers: str) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    promised = {
        name.replace("_", "-"): {"required": True, "schema": {"type": kind}}
        for name, kind in headers.items()
    }
    return {"description": description, "content": content, "headers": promised}


_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: _json({"anyOf": [_SCORED, _PLAIN]}, "Per query, best first", x_index_version="string"),
    401: _json(_REFUSAL, "The token is missing or wrong", www_authenticate="string"),
    413: _json(_REFUSAL, "The body is too large"),
    422: _json(_REFUSAL, "The request is malformed or over a limit"),
    503: _json(_REFUSAL, "Too much is waiting, or took too long", retry_after="integer"),
}


class _App(FastAPI):
    """FastAPI whose OpenAPI document takes its schemas from the wire types, and names the token;
    without its pages, which load scripts from elsewhere.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(title=TITLE, version="1", docs_url=None, redoc_url=None, **given)

    def openapi(self) -> dict[str, Any]:
        """The specification, built once."""
        if self.openapi_schema is None:
            spec = get_openapi(title=self.title, version=self.version, routes=self.routes)
            spec.setdefault("components", {}).setdefault("schemas", {}).update(_components)
            spec["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            self.openapi_schema = spec
        return self.openapi_schema


def create_app(
    documents: Sequence[Document],
    index: Index,
    default_top_k: int = DEFAULT_TOP_K,
    token: str = "",
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> FastAPI:
    """The application over documents and an index of their contents, positions agreeing.

    `default_top_k` answers requests whose `topk` is null. A search must show `token`, unless it is
    empty. Set `app.state.draining` when no more searches should come.
    """
    version = blake3(f"{index.name}\0{index.fingerprint}\0{digest_of(documents)}".encode())
    info = Info(index.name, version.hexdigest(length=8), len(documents), default_top_k)
    metrics = Metrics()
    queue = _queue(documents, index, metrics, limits)
    return _application(queue, info, metrics, token, limits.deadline_s)


def create_live_app(
    live: LiveSearch,
    default_top_k: int = DEFAULT_TOP_K,
    token: str = "",
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> FastAPI:
    """The same over the live web, of which no passages are held here."""
    info = Info(live.name, blake3(live.name.encode()).hexdigest(length=8), 0, default_top_k)
    metrics = Metrics()
    metrics.watch_live(live.figures)
    return _application(live, info, metrics, token, limits.deadline_s)


def _application(
    searches: AbstractAsyncContextManager[Searches],
    info: Info,
    metrics: Metrics,
    token: str,
    deadline_s: float,
) -> FastAPI:
    app = _App(lifespan=_lifespan(searches, metrics))
    app.state.draining = False
    search = _Search(app, info, token, deadline_s)

    @app.post(
        "/retrieve",
        openapi_extra={
            "requestBody": {"required": True, "content": _json(_REQUEST, "")["content"]},
            "security": [{"token": []}] if token else [],
        },
        responses=_RESPONSES,
    )
    async def retrieve(request: Request) -> Response:
        """Search for every query; `return_scores` chooses the form of the reply."""
        begun, status = time.monotonic(), 500
        try:
            response = await search.answer(request)
            status = response.status_code
            return response
        finally:
            metrics.answered(status, time.monotonic() - begun)

    _operator_routes(app, info, metrics)
    return app


class _Search:
    """The answer to `POST /retrieve`."""

    def __init__(self, app: FastAPI, info: Info, token: str, deadline_s: float) -> None:
        self._app, self._default_top_k = app, info.default_top_k
        self._version = {INDEX_VERSION: info.index_version}
        self._token, self._deadline_s = token, deadline_s

    async def answer(self, request: Request) -> Response:
        """Results, or what was wrong."""
        if not authorized(self._token, request.headers.get("authorization", "")):
            return _reply(Refusal(UNAUTHORIZED), 401, {"www-authenticate": "Bearer"})
        queue: Searches = self._app.state.searches
        begun = time.monotonic()
        try:
            left_s = _left_s(request, self._deadline_s)
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + left_s):
                asked = _request_decoder.decode(await _body(request))
                top_k = asked.topk or self._default_top_k
                found = await _while_there(
                    request, queue.search(asked.wanted, top_k, begun + left_s)
                )
        except _FAULTS as error:
            return _fault(error)
        except RetrievalOverloaded as error:
            return _later(str(error), error.retry_after_s, queue.offered)
        except NotRecorded as error:
            return _reply(Refusal(f"{type(error).__name__}: {error}"), 422)
        except RetrievalError as error:
            logger.error("a search failed: %s", error)
            return _later(str(error), 1.0, queue.offered)
        except TimeoutError:
            said = f"not found within {left_s:g} s, {queue.waiting} queries are waiting"
            return _later(said, queue.backlog_s, queue.offered)
        headers = {**self._version, BATCH_QUERIES: f"{queue.offered}"}
        if asked.return_scores:
            return _reply(ScoredReply(found), headers=headers)
        plain = PlainReply([[hit.document for hit in row] for row in found])
        return _reply(plain, headers=headers)


def _operator_routes(app: FastAPI, info: Info, metrics: Metrics) -> None:
    """Add the routes for those who run the server."""

    @app.get("/health", responses={200: _json(_HEALTH, "Alive")})
    async def health() -> Response:
        """A sign of life, and the number of passages."""
        return _reply(Health("ok", info.passages))

    @app.get("/ready", responses={200: _json(_READY, "Ready"), 503: _json(_READY, "Draining")})
    async def ready() -> Response:
        """Readiness for searches: 503 while draining."""
        draining = app.state.draining
        return _reply(Readiness("draining" if draining else "ready"), 503 if draining else 200)

    @app.get("/info", responses={200: _json(_INFO, "What is served")})
    async def tell() -> Response:
        """The index that is served, and the limits of a request."""
        return _reply(info)

    @app.get("/docs", include_in_schema=False)
    async def manual() -> Response:
        content, headers = render(app.openapi())
        return Response(content, headers=headers)

    @app.get("/metrics", include_in_schema=False)
    async def tell_metrics() -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})


def _lifespan(
    searches: AbstractAsyncContextManager[Searches], metrics: Metrics
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with searches as opened:
            app.state.searches = opened
            metrics.watch(lambda: opened.waiting)
            yield

    return lifespan


@asynccontextmanager
async def _queue(
    documents: Sequence[Document], index: Index, metrics: Metrics, limits: Limits
) -> AsyncIterator[Searches]:
    """The queue before an index, which has a thread of its own."""

    def find(queries: list[str], top_k: int) -> Rows:
        # Here, not where replies are written: documents may have to be read from the disk.
        rows = index.search(queries, top_k)
        return [[ScoredDocument(documents[hit.position], hit.score) for hit in row] for row in rows]

    def search(queries: list[str], top_k: int) -> asyncio.Future[Rows]:
        metrics.searched(len(queries))
        return asyncio.get_running_loop().run_in_executor(thread, find, queries, top_k)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="index") as thread:
        queue = SearchQueue(
            search,
            max_batch=MAX_BATCH,
            max_waiting=limits.waiting_queries,
            deadline_s=limits.deadline_s,
        )
        async with queue:
            yield queue


def _left_s(request: Request, most_s: float) -> float:
    """The seconds that a client waits at most, where it tells."""
    if (told := request.headers.get(DEADLINE)) is None:
        return most_s
    try:
        seconds = float(told)
    except ValueError:
        seconds = math.nan
    if not seconds > 0.0:
        raise _BadHeader(f"{DEADLINE}: {told[:40]!r} is no number of seconds above 0")
    return min(seconds, most_s)


async def _while_there(request: Request, results: asyncio.Future[Rows]) -> Rows:
    """What is found, while the client waits for it. Raises _Gone, and ends the search, where it
    leaves.
    """
    leaving = asyncio.ensure_future(request.receive())  # all else of it has been read
    leaving.add_done_callback(lambda _: results.cancel())
    try:
        return await results
    except asyncio.CancelledError:
        if leaving.done() and not leaving.cancelled():
            raise _Gone from None
        raise
    finally:
        results.cancel()
        leaving.cancel()


async def _body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _TooLarge
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _TooLarge
    return b"".join(chunks)


def _reply(
    body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(_encoder.encode(body), status, headers, media_type="application/json")


def _fault(error: Exception) -> Response:
    """The answer to a request that cannot be understood, or that nobody waits for any more."""
    if isinstance(error, _TooLarge):
        return _reply(Refusal(f"the body is too large; {ALLOWED}"), 413)
    if isinstance(error, ClientDisconnect):
        return _reply(Refusal("the client left before its request was complete"), 400)
    if isinstance(error, _Gone):
        return _reply(Refusal("the client left before it was answered"), CLIENT_GONE)
    return _reply(Refusal(f"{error}; {ALLOWED}"), 422)


def _later(said: str, after_s: float, offered: int) -> Response:
    headers = {
        "retry-after": str(max(1, math.ceil(after_s))),
        RETRY_AFTER: f"{after_s:.3f}",
        BATCH_QUERIES: f"{offered}",
    }
    return _reply(Refusal(f"{said}; ask again later"), 503, headers)

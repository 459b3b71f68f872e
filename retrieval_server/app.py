"""The HTTP application: Search-R1's `POST /retrieve`, and `GET /health`.

Consumes requests; produces replies encoded straight from the wire types (FastAPI's own model
serialisation costs more than a search does); waits for the index, which runs on a thread of its own
behind a batcher; both live in the lifespan.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.requests import ClientDisconnect

from retrieval_server.batching import Batcher
from retrieval_server.bearer import shows
from retrieval_server.index import Hit, Index
from retrieval_server.protocol import (
    ALLOWED,
    DEFAULT_TOP_K,
    MAX_BODY_BYTES,
    UNAUTHORIZED,
    Document,
    Health,
    PlainReply,
    Refusal,
    RetrieveRequest,
    ScoredDocument,
    ScoredReply,
)

MAX_BATCH = 256

_request_decoder = msgspec.json.Decoder(RetrieveRequest)
_encoder = msgspec.json.Encoder()
_schemas, _components = msgspec.json.schema_components(
    [RetrieveRequest, ScoredReply, PlainReply, Health, Refusal],
    ref_template="#/components/schemas/{name}",
)
_REQUEST, _SCORED, _PLAIN, _HEALTH, _REFUSAL = _schemas


class _TooLarge(Exception):
    """The body passed MAX_BODY_BYTES."""


def _json(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: _json({"anyOf": [_SCORED, _PLAIN]}, "Per query, best first"),
    401: _json(_REFUSAL, "The token is missing or wrong"),
    413: _json(_REFUSAL, "The body is too large"),
    422: _json(_REFUSAL, "The request is malformed or over a limit"),
}


class _App(FastAPI):
    """FastAPI whose OpenAPI page takes its schemas from the wire types."""

    def openapi(self) -> dict[str, Any]:
        """The specification, built once."""
        if self.openapi_schema is None:
            spec = get_openapi(title=self.title, version=self.version, routes=self.routes)
            spec.setdefault("components", {}).setdefault("schemas", {}).update(_components)
            self.openapi_schema = spec
        return self.openapi_schema


def create_app(
    documents: Sequence[Document],
    index: Index,
    default_top_k: int = DEFAULT_TOP_K,
    token: str = "",
) -> FastAPI:
    """The application over documents and an index of their contents, positions agreeing.

    `default_top_k` answers requests whose `topk` is null. A search must show `token`, unless it is
    empty.
    """
    app = _App(title="Forage retrieval server", version="1", lifespan=_lifespan(index))

    @app.post(
        "/retrieve",
        openapi_extra={"requestBody": {"required": True, **_json(_REQUEST, "What to search for")}},
        responses=_RESPONSES,
    )
    async def retrieve(request: Request) -> Response:
        """Search for every query; `return_scores` chooses the form of the reply."""
        if not shows(token, request.headers.get("authorization", "")):
            return _reply(Refusal(UNAUTHORIZED), 401, {"www-authenticate": "Bearer"})
        try:
            asked = _request_decoder.decode(await _body(request))
        except _TooLarge:
            return _reply(Refusal(f"the body is too large; {ALLOWED}"), 413)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _reply(Refusal(f"{error}; {ALLOWED}"), 422)
        except ClientDisconnect:
            return _reply(Refusal("the client left before its request was complete"), 400)
        batcher: Batcher[Hit] = app.state.batcher
        hits = await batcher.search(asked.queries, asked.topk or default_top_k)
        return _reply(_result(documents, hits, asked.return_scores))

    @app.get("/health", responses={200: _json(_HEALTH, "Serving")})
    async def health() -> Response:
        """Whether the server serves, and how many passages."""
        return _reply(Health("ok", len(documents)))

    return app


def _lifespan(index: Index) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="index") as thread:

            def search(queries: list[str], top_k: int) -> asyncio.Future[list[list[Hit]]]:
                return loop.run_in_executor(thread, index.search, queries, top_k)

            async with Batcher(search, max_batch=MAX_BATCH) as batcher:
                app.state.batcher = batcher
                yield

    return lifespan


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


def _result(
    documents: Sequence[Document], hits: list[list[Hit]], scores: bool
) -> ScoredReply | PlainReply:
    if scores:
        return ScoredReply(
            [[ScoredDocument(documents[hit.position], hit.score) for hit in row] for row in hits]
        )
    return PlainReply([[documents[hit.position] for hit in row] for row in hits])


def _reply(
    body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(_encoder.encode(body), status, headers, media_type="application/json")

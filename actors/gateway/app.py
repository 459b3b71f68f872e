"""The HTTP application of a gateway: its routes, and the OpenAPI document that tells of them."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from actors.gateway.endpoints import Endpoints
from actors.gateway.protocol import (
    ChatRequest,
    CompletionRequest,
    ErrorReply,
    Refused,
    ResultRequest,
)
from retrieval_server.protocol import RetrieveRequest

TITLE = "Forage gateway"
_schemas, _components = msgspec.json.schema_components(
    [ChatRequest, CompletionRequest, ResultRequest, RetrieveRequest, ErrorReply],
    ref_template="#/components/schemas/{name}",
)
_CHAT, _COMPLETION, _RESULT, _SEARCH, _ERROR = _schemas
_OBJECT = {"type": "object"}
_REFUSALS = {
    400: "A field is wrong, or cannot be served",
    401: "The key is of no session",
    410: "The session has ended",
    413: "The body is too large",
    429: "The session has made, or makes, too many calls",
    500: "The gateway has a fault, which is in the actor's log",
    503: "The policy, or verified weights, could not be had",
}
Serve = Callable[[Request], Coroutine[Any, Any, Response]]


class _App(FastAPI):
    """FastAPI whose OpenAPI document takes its schemas from the wire types, and names the key."""

    def openapi(self) -> dict[str, Any]:
        """The specification, built once."""
        if self.openapi_schema is None:
            spec = get_openapi(title=self.title, version=self.version, routes=self.routes)
            spec.setdefault("components", {}).setdefault("schemas", {}).update(_components)
            spec["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            self.openapi_schema = spec
        return self.openapi_schema


def create_app(endpoints: Endpoints) -> FastAPI:
    """The application over a gateway's endpoints."""
    app = _App(title=TITLE, version="1", docs_url=None, redoc_url=None)
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    chat, text = endpoints.chat, endpoints.completion
    _add(app, "POST", "/v1/chat/completions", chat, "The policy's next message", _CHAT, stream)
    _add(app, "POST", "/v1/completions", text, "What the policy goes on with", _COMPLETION, stream)
    _add(app, "POST", "/v1/result", endpoints.result, "Taken", _RESULT)
    _add(app, "POST", "/v1/retrieve", endpoints.retrieve, "What each query has found", _SEARCH)
    _add(app, "GET", "/v1/models", endpoints.models, "The one model, whatever it is called")
    _add(app, "GET", "/v1/models/{model:path}", endpoints.model, "The model")

    async def nowhere(request: Request, _: Exception) -> Response:
        what = f"{request.method} {request.url.path}"
        served = ", ".join(sorted(app.openapi()["paths"]))
        return endpoints.refuse(Refused(f"{what} is not served: {served} are", status=404))

    for status in (404, 405):
        app.add_exception_handler(status, nowhere)
    return app


def _add(
    app: FastAPI,
    method: str,
    path: str,
    serve: Serve,
    told: str,
    body: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    content = {"application/json": {"schema": _OBJECT}} | (more or {})
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": said, "content": {"application/json": {"schema": _ERROR}}}
        for status, said in _REFUSALS.items()
    }
    responses[200] = {"description": told, "content": content}
    if serve.__name__ == "result":
        responses[409] = responses[400] | {"description": "Another result was posted before"}
    if serve.__name__ == "retrieve":
        responses[404] = responses[400] | {"description": "The session has nothing to search"}
    extra: dict[str, Any] = {"security": [{"key": []}]}
    if serve.__name__ == "model":
        responses[404] = responses[400] | {"description": "No model is named"}
        named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        extra["parameters"] = [named]
    if body is not None:
        schema = {"application/json": {"schema": body}}
        extra["requestBody"] = {"required": True, "content": schema}
    app.add_api_route(
        path, serve, methods=[method], responses=responses, openapi_extra=extra, name=path
    )

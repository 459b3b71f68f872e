"""The local web server of the pages.

It listens on the loopback alone, below a path that is drawn at each start: who does not know it,
another user of this machine or a page of the web, is answered with 404. Nothing is written by it.
"""

import asyncio
import math
import socket
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from types import FrameType
from typing import Annotated, Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from configs.load import ConfigError
from replay.protocol import ReplayError
from scripts.command.terminal import clean
from scripts.runs.runs import LATEST
from scripts.view import answers
from scripts.view.health import health
from scripts.view.index import Index
from scripts.view.rollouts.wanted import Wanted, steps_of
from scripts.view.timeline import timeline

BUILT = Path(__file__).parent / "built"
MOST_ROWS = 500  # of one answer
MOST_NAMES = 64  # of gauges in one question
MOST_BODY = 1_000_000  # bytes of it
MOST = 10**15  # of a number that is asked for: larger ones the index does not take
EVERY_S = 1.0  # between two looks at the logs
_BEAT_S = 15.0  # the least often a live page is written to, so that one that left is noticed
_TYPES = {"index.html": "text/html", "app.js": "text/javascript", "app.css": "text/css"}
_Names = Annotated[list[str], msgspec.Meta(max_length=MOST_NAMES)]
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Following(threading.Thread):
    """Keeps an index up to date; `version` counts what was new, also the end of a run. `leaving`:
    pages are let go.
    """

    def __init__(self, index: Index) -> None:
        super().__init__(name="index", daemon=True)
        self._index, self._over = index, threading.Event()
        self.version, self.leaving = 0, False
        self._states = self._look()

    def run(self) -> None:
        """Look again and again until it is stopped."""
        while not self._over.is_set():
            changed = self._index.catch_up(self._over)
            before, self._states = self._states, self._look()
            if changed or self._states != before:
                self.version += 1
            self._over.wait(EVERY_S)

    @property
    def going(self) -> bool:
        """True where one of the runs goes on."""
        return "running" in self._states

    def stop(self) -> None:
        """End it."""
        self._over.set()
        self.join()

    def _look(self) -> list[str]:
        """The state of each run, without how long ago it was cut off."""
        states = (answers.state_and_damage(run)[0] for run in self._index.runs)
        return [state.partition(" off ")[0] for state in states]


class Server(uvicorn.Server):
    """The server; at its end it lets go of the pages that wait for news."""

    def __init__(self, index: Index, following: Following, key: str) -> None:
        self._following = following
        super().__init__(
            uvicorn.Config(
                application(index, following, key),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=5,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end."""
        self._following.leaving = True
        super().handle_exit(sig, frame)


def application(index: Index, following: Following, key: str) -> Starlette:
    """The pages below `/key/`."""

    def answering(answer: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], Response]:
        return lambda request: _answered(lambda: answer(request.query_params))

    async def curves(request: Request) -> Response:
        body = await _body(request)
        return await run_in_threadpool(_answered, lambda: answers.curves(index, _names(body)))

    async def live(request: Request) -> Response:
        return StreamingResponse(_news(request, following), headers=_HEADERS | {
            "Content-Type": "text/event-stream"})  # fmt: skip

    asked: dict[str, Callable[[Mapping[str, str]], Any]] = {
        "overview": lambda _: answers.overview(index),
        "health": lambda _: health(index),
        "timeline": lambda given: timeline(index, _whole(given, "run", 0), *_span(given, "time")),
        "waits": lambda given: answers.waiting(index, _whole(given, "run", 0)),
        "rollouts": lambda given: rollouts(index, given),
        "rollout": lambda given: answers.rollout(
            index, _whole(given, "run", 0), _whole(given, "number", 0)
        ),
    }
    routes = [Route(f"/api/{name}", answering(answer)) for name, answer in asked.items()]
    routes += [Route("/api/curves", curves, methods=["POST"]), Route("/api/live", live)]
    files = [Route(f"/{'' if name == 'index.html' else name}", _file(name)) for name in _TYPES]
    return Starlette(routes=[Mount(f"/{key}", routes=[*routes, *files])])


def _answered(answer: Callable[[], Any]) -> Response:
    """An answer, or why there is none."""
    try:
        return _json(answer())
    except (ConfigError, ReplayError, ValueError) as error:
        return _json({"error": clean(str(error))}, 400)
    except OSError as error:
        return _json({"error": clean(str(error))}, 500)
    except sqlite3.Error as error:
        told = f"the index in {gettempdir()}: {error}: is there room, and may it be written?"
        return _json({"error": clean(told)}, 500)


async def _body(request: Request) -> bytes:
    """What came with a request, read no further than where it is too long."""
    body = bytearray()
    with suppress(ClientDisconnect):
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                break
    return bytes(body)


def _names(body: bytes) -> list[str]:
    """The gauges that are asked for. Raises ValueError."""
    if len(body) > MOST_BODY:
        raise ValueError(f"curves: more than {MOST_BODY} bytes: ask for fewer at once")
    try:
        return msgspec.json.decode(body, type=_Names)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"curves: give a JSON list of at most {MOST_NAMES} names of gauges ({error})"
        ) from error


def rollouts(index: Index, given: Mapping[str, str]) -> dict[str, Any]:
    """Some of the rollouts that are asked for. Raises ValueError for a number that is none."""

    def span(name: str, most: float = 1e9) -> tuple[float, float] | None:
        first, last = _span(given, name)
        if first is None and last is None:
            return None
        return -most if first is None else first, most if last is None else last

    wanted = Wanted(
        run=_whole(given, "run", -1),
        kind=given.get("kind", ""),
        stop=given.get("stop", ""),
        text=given.get("text", "")[:200],
        question=given.get("question", ""),
        group=_whole(given, "group", -1),
        steps=steps_of(given.get("steps", "")),
        reward=span("reward"),
        searches=span("searches"),
        staleness=span("staleness"),
        actor=given.get("actor", ""),
        times=span("time", LATEST),
        which=given.get("which", ""),
        sort=given.get("sort", "number"),
        descending=given.get("descending", "1") == "1",
    )
    most = min(MOST_ROWS, max(0, _whole(given, "most", 100)))
    count, rows = index.rollouts(wanted, max(0, _whole(given, "begin", 0)), most)
    return {"count": count, "rows": rows}


def _whole(given: Mapping[str, str], name: str, default: int) -> int:
    """The whole number that is asked for. Raises ValueError."""
    text = given.get(name, "")
    try:
        found = int(text) if text else default
    except ValueError:
        found = MOST + 1
    if abs(found) > MOST:
        raise ValueError(f"{name} = {text[:40]!r}: give a whole number of at most {MOST}")
    return found


def _span(given: Mapping[str, str], name: str) -> tuple[float | None, float | None]:
    """The two ends that are asked for; None: open. Raises ValueError."""
    ends = [given.get(f"{name}_{end}", "") for end in ("from", "to")]
    first, last = (float(end) if end else None for end in ends)
    if math.isnan(first or 0) or math.isnan(last or 0):
        raise ValueError(f"{name}: cannot convert float NaN to a time")
    return first, last


def listener(port: int) -> socket.socket:
    """A socket of the loopback's. Raises ConfigError where the port is taken."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen()
    except OverflowError as error:
        found.close()
        raise ConfigError(
            f"--port {port}: give 1 to 65535, or leave it out for a free one"
        ) from error
    except OSError as error:
        found.close()
        raise ConfigError(
            f"--port {port}: cannot listen there ({error.strerror}): "
            "stop what uses it, name another, or leave it out for a free one"
        ) from error
    return found


async def _news(request: Request, following: Following) -> AsyncIterator[str]:
    """A line for the page whenever something was new."""

    def told() -> str:
        return f'data: {{"version": {seen}, "going": {str(following.going).lower()}}}\n\n'

    seen, silent_s = following.version, 0.0
    yield told()
    while not (following.leaving or await request.is_disconnected()):
        await asyncio.sleep(EVERY_S / 2)
        silent_s += EVERY_S / 2
        if following.version != seen:
            seen, silent_s = following.version, 0.0
            yield told()
        elif silent_s >= _BEAT_S:
            silent_s = 0.0
            yield ": nothing new\n\n"


def _file(name: str) -> Callable[[Request], Response]:
    def endpoint(_: Request) -> Response:
        return Response((BUILT / name).read_bytes(), media_type=_TYPES[name], headers=_HEADERS)

    return endpoint


def _json(value: Any, status: int = 200) -> Response:
    text = msgspec.json.encode(value)  # a number that is not finite becomes null
    return Response(text, status, _HEADERS, "application/json")

"""A small corpus, our real server over it, and a faulty server that answers as its script says."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from retrieval_server.app.app import Limits, create_app
from retrieval_server.index.base import Index
from retrieval_server.index.bm25 import BM25Index
from retrieval_server.protocol import Document

LIMITS = Limits()
CONTENTS = (
    '"mayor of bore"\nthe mayor of bore is kelu .',
    '"capital of xanu"\nthe capital of xanu is bore .',
    '"river of xanu"\nthe river of xanu is miro .',
    '"mayor of miro"\nthe mayor of miro is tapo .',
)


@pytest.fixture
def write_corpus(tmp_path: Path) -> Callable[..., Path]:
    """Rows (objects, or lines as they are) → the path of a corpus file."""

    def write(*rows: dict[str, object] | str) -> Path:
        path = tmp_path / "corpus.jsonl"
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture
def write_token(tmp_path: Path) -> Callable[..., Path]:
    """write_token(text, mode) → the path of a token's file."""

    def write(text: str, mode: int = 0o600) -> Path:
        path = tmp_path / "token"
        path.write_text(text + "\n")
        path.chmod(mode)
        return path

    return write


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Any application, under uvicorn on a free loopback port: its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    port = listener.getsockname()[1]
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
    assert not thread.is_alive()


@contextmanager
def serving(
    token: str = "",
    index: Index | None = None,
    limits: Limits = LIMITS,
    contents: Sequence[str] = CONTENTS,
) -> Iterator[str]:
    """Our server over the contents (p0, p1 …): its base URL."""
    documents = [Document(f"p{i}", text) for i, text in enumerate(contents)]
    with running(create_app(documents, index or BM25Index(contents), 2, token, limits)) as url:
        yield url


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Base URL of a server that lets everybody in."""
    with serving() as url:
        yield url


@pytest.fixture(scope="session")
def guarded_url() -> Iterator[str]:
    """Base URL of a server whose token is `sesame-12`."""
    with serving("sesame-12") as url:
        yield url


def http(status: int, body: object, length: int | None = None, headers: str = "") -> bytes:
    """A raw HTTP reply; `length` overrides the declared one."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    declared = len(content) if length is None else length
    return f"HTTP/1.1 {status} X\r\n{headers}content-length: {declared}\r\n\r\n".encode() + content


class Faulty:
    """A server whose n-th request meets the n-th reply of its script; the last one repeats.

    A reply is raw bytes; b"" closes the connection unanswered, None never answers. What is got
    instead of posted is answered with `got`, and counts as no request.
    """

    def __init__(self, script: list[bytes | None]) -> None:
        self.script = script
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []  # in lower case
        self.connections = self.gets = 0
        self.got = http(404, b"")  # as Search-R1's servers do
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        while reply := await self._next(reader):
            writer.write(reply)
        writer.close()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        except asyncio.IncompleteReadError:
            return b""
        if head.startswith("get "):
            self.gets += 1
            return self.got
        self.heads.append(head)
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        reply = self.script[min(len(self.bodies), len(self.script)) - 1]
        if reply is None:
            await reader.read()  # until the client gives up
        return reply or b""


@pytest.fixture
async def faulty() -> AsyncIterator[Callable[..., Awaitable[Faulty]]]:
    """Start faulty servers by their scripts."""
    servers: list[asyncio.Server] = []

    async def start(*script: bytes | None, port: int = 0) -> Faulty:
        fault = Faulty(list(script))
        server = await asyncio.start_server(fault.answer, "127.0.0.1", port)
        servers.append(server)
        fault.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return fault

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.fixture
def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def serve() -> Any:
    """`serving`, for tests that need a server of their own."""
    return serving


@pytest.fixture
def reply() -> Callable[..., bytes]:
    """`http`, for tests."""
    return http

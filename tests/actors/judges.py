"""A small OpenAI-compatible server that answers as its script says, and rewards of a user's own."""

import asyncio
import json
from types import TracebackType
from typing import Any, Self

from actors.rewards.transcript import Transcript


def http(status: int, body: object, headers: str = "") -> bytes:
    """A raw HTTP reply."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def says(words: str | None, finish: str = "stop") -> bytes:
    """A chat completion."""
    message = {"role": "assistant", "content": words}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return http(200, {"choices": [choice], "usage": {"total_tokens": 9}})


class JudgeServer:
    """Its n-th request meets the n-th reply of its script; the last one repeats.

    A reply is raw bytes; b"" closes the connection unanswered, None never answers. Replies wait for
    `free`. Leaving does not wait for who is still connected.
    """

    def __init__(self, *script: bytes | None) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.free = asyncio.Event()
        self.free.set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while reply := await self._next(reader):
                writer.write(reply)
            writer.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        self.heads.append(head)
        self.requests.append(json.loads(await reader.readexactly(length)))
        reply = self.script[min(len(self.requests), len(self.script)) - 1]
        await self.free.wait()
        if reply is None:
            await reader.read()  # until the client gives up
        return reply or b""


def brevity(transcript: Transcript) -> float:
    """A user's reward: shorter answers earn more."""
    return 1.0 / (1 + len(transcript.answer or ""))


async def evidence(transcript: Transcript) -> int:
    """A user's reward: how many passages hold the answer."""
    return sum((transcript.answer or "\0") in passage.contents for passage in transcript.passages)


def broken(transcript: Transcript) -> float:
    """A user's reward that raises."""
    raise KeyError("no such answer")


def blanking(transcript: Transcript) -> float:
    """A user's reward that writes into what it reads."""
    transcript.turns[0].behaviour_logprobs[:] = 0.0
    return 1.0


NOT_CALLABLE = 3

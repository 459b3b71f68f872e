"""What tests of `forage ask` ask with: a tokenizer of bytes, policies that say what they are
told to, and an OpenAI-compatible server that answers as its script says.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.policies.base import Completion, Stops
from actors.prompt import Prompter
from configs.environment import EnvironmentConfig
from configs.retrieval import RetrievalConfig
from configs.schema import ActorsConfig, Config, ModelConfig, QuestionsConfig
from retrieval_server.protocol import Passage
from scripts.ask.stream import Asker, StreamDecoder, View

SEARCH, ANSWER = "<think> who? </think> <search> mayor of bore </search>", "<answer> kelu </answer>"
PASSAGES = [
    Passage("p0", '"Bore"\nthe mayor of bore is kelu .', 1.0),
    Passage("p1", "a passage without a title", 0.5),
]
Reply = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class Bytes:
    """A tokenizer whose tokens are bytes; a beginning and an end token are special."""

    bos_token_id, eos_token_id, all_special_ids = 0, 1, [0, 1]
    special = ("<|begin|>", "<|end|>")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [byte + 2 for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        pieces = (
            bytes([each - 2]) if each > 1 else b"" if skip_special_tokens else self.named(each)
            for each in ids
        )
        return b"".join(pieces).decode(errors="replace")

    def named(self, special: int) -> bytes:
        return self.special[special].encode()


@dataclass
class Saying:
    """A policy that says its texts one after the other, telling each token."""

    texts: Sequence[str]
    heard: Callable[[int], None]
    asked: list[list[int]] = field(default_factory=list)
    error: Exception | None = None  # in the middle of a text

    async def complete(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> Completion:
        ids = Bytes().encode(self.texts[len(self.asked)], False)[:max_tokens]
        self.asked.append(list(tokens))
        for token in ids[: len(ids) // 2] if self.error else ids:
            self.heard(token)
        if self.error:
            raise self.error
        numbers = np.zeros(len(ids))
        return Completion(
            np.asarray(ids, np.int32), numbers.astype(np.float32), numbers.astype(np.int32), "stop"
        )


@dataclass
class Finding:
    """A retriever that finds the same passages each time."""

    passages: Sequence[Passage] = tuple(PASSAGES)

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [list(self.passages[:top_k]) for _ in queries]


def make_asker(view: View, *texts: str, environment: str = "search_r1", **changes: Any) -> Asker:
    """An asker whose policy says these texts."""
    config = Config(
        environment=EnvironmentConfig(name=environment),
        model=ModelConfig(max_model_len=4000),
        questions=QuestionsConfig(prompt="{question}"),
        retrieval=RetrievalConfig(top_k=2),
        actors=ActorsConfig(max_turns=2, correction="try again ."),
    )
    words = StreamDecoder(Bytes(), view.said)
    parts = {"policy": Saying(texts, words.put), "retriever": Finding()} | changes
    prompter = Prompter(Bytes(), config.questions, config.actors)
    return Asker(config, prompter=prompter, words=words, view=view, **parts)


def event(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    """A line of the stream: a piece of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": finish, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def stream(*events: bytes, whole: bool = True) -> bytes:
    """A streamed reply, in chunks; not `whole`: the connection ends in the middle."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head + b"".join(map(chunk, events)) + (b"0\r\n\r\n" if whole else b"")


def chunk(content: bytes) -> bytes:
    """A chunk of a reply."""
    return b"%x\r\n%s\r\n" % (len(content), content)


def refuse(status: int, message: str) -> bytes:
    """An error, in vLLM's words."""
    return plain(status, {"error": {"message": message, "code": status}})


def plain(status: int, body: object) -> bytes:
    """A reply of JSON."""
    content = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(content), content)


@dataclass
class Endpoint:
    """Its n-th completion is answered by the n-th reply of its script; the last one repeats."""

    script: Sequence[Reply]
    models: Sequence[str] = ("forage",)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: list[asyncio.Task[Any]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of a connection, and close it; who leaves gets no answer."""
        task = asyncio.current_task()
        assert task is not None
        self.connections.append(task)
        with suppress(OSError, asyncio.IncompleteReadError):
            await self.answer(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.heads.append(head)
        reply: Reply = plain(200, {"data": [{"id": name} for name in self.models]})
        if head.startswith("post"):
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            reply = self.script[min(len(self.bodies), len(self.script)) - 1]
        if isinstance(reply, bytes):
            writer.write(reply)
        else:
            await reply(writer)


@asynccontextmanager
async def endpoint(*script: Reply, models: Sequence[str] = ("forage",)) -> AsyncIterator[Endpoint]:
    """A server on a free port of the loopback."""
    served = Endpoint(script, models)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*served.connections)

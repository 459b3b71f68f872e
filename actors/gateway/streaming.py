"""Server-sent events of a call: its pieces as they come, and its error where it fails half-way."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.gateway.completing import Piece
from actors.gateway.protocol import Refused
from actors.gateway.replies import Replies, event
from actors.gateway.sessions import Work

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Events(StreamingResponse):
    """A stream that tells when it is over: read to its end, broken off, or never begun."""

    def __init__(
        self, events: AsyncIterator[bytes], over: Callable[[], Awaitable[None]], **given: Any
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS, **given)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._over()


async def events(
    first: Piece,
    pieces: AsyncGenerator[Piece, None],
    replies: Replies,
    ends: float,
    refusal: Callable[[BaseException], Refused | None],
    work: Work,
) -> AsyncIterator[bytes]:
    """Yield the events of a call whose first piece is there; `ends`: by the loop's clock. What
    `refusal` makes of an error is the last event. `work` is the sending task's from here on.
    """
    work.attach()
    piece = first
    try:
        while True:
            work.answered = piece.made is not None
            for each in replies.events(piece):
                yield each
            if piece.made is not None:
                return
            async with asyncio.timeout_at(ends):
                piece = await anext(pieces)
    except (Exception, asyncio.CancelledError) as error:
        if (refused := refusal(error)) is None:
            raise
        yield event(refused.body)

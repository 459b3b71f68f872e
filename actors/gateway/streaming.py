"""Server-sent events of a call: its pieces as they come, and its error where it fails half-way."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.gateway.protocol import Refused
from actors.gateway.replies import event

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Events(StreamingResponse):
    """A stream that tells when it is over, and whether it was sent to its end: else it was broken
    off, or never begun.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        over: Callable[[bool], Awaitable[None]],
        **given: Any,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS, **given)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        sent = False

        async def noted(message: Any) -> None:
            nonlocal sent
            await send(message)
            sent = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await super().__call__(scope, receive, noted)
        finally:
            await self._over(sent)


async def events(
    first: bytes,
    pieces: AsyncGenerator[bytes, None],
    ends: float,
    refusal: Callable[[BaseException], Refused | None],
    begun: Callable[[], None],
) -> AsyncIterator[bytes]:
    """Yield the events of a call whose first are there; `ends`: by the loop's clock. What `refusal`
    makes of an error is the last event. `begun` is called by the task that sends them.
    """
    begun()
    told: bytes | None = first
    try:
        while told is not None:
            if told:
                yield told
            async with asyncio.timeout_at(ends):
                told = await anext(pieces, None)
    except (Exception, asyncio.CancelledError) as error:
        if (refused := refusal(error)) is None:
            raise
        yield event(refused.body)

"""The actor's control socket is a DEALER."""

import contextlib
from typing import Self

import zmq
import zmq.asyncio

from configs.keys import Keys
from weight_sync.channel import HEARTBEAT_MS, SILENT_MS
from weight_sync.protocol import FromActor, FromLearner, decode_from_learner, encode


class Link:
    """The actor's DEALER, a context manager; `peer` names the learner in errors."""

    def __init__(self, endpoint: str, keys: Keys | None, peer: str) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 500)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, SILENT_MS)
        if keys is not None:
            keys.present(dealer)
        dealer.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._dealer.close()
        self._context.term()

    async def send(self, message: FromActor) -> None:
        """Send one message; lost when the learner has been gone for long, or the connection has
        ended for good (its bytes were changed on the way): it hears Join again, on a new one.
        """
        try:
            await self._dealer.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            with contextlib.suppress(zmq.ZMQError):
                self._dealer.disconnect(self._endpoint)
            self._dealer.connect(self._endpoint)

    async def next(self, limit_s: float) -> FromLearner | None:
        """The next message, None when there is none within `limit_s`."""
        if not await self._dealer.poll(int(limit_s * 1000)):
            return None
        message: FromLearner = decode_from_learner(await self._dealer.recv())
        return message

"""An actor's connection to replay: `TrajectoryWriter`, on asyncio.

It outlives a replay that is killed and started again on its log: the actor introduces itself anew.
Every wait has a name and ends with ReplayTimeout when replay is silent for `restart_deadline_s`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import zmq
import zmq.asyncio

import replay.protocol as wire
from configs.keys import ACTOR, Keys
from replay.clients.base import LINGER_MS, RESTART_DEADLINE_S, connect_anew, dealer
from replay.clients.session import Inbox, Session
from replay.codec import decode_reply, encode, encode_trajectory
from replay.trajectory import Search, Trajectory

logger = logging.getLogger(__name__)


class TrajectoryWriter:
    """An actor's connection: leases in, trajectories out. Use as an async context manager.

    `gauges` is called for each Heartbeat. What waits here when Stop arrives is returned as failed
    (`shutdown`). A replay that is silent for `dead_after_s` is noted in the log; one that was
    started again is told what this actor holds and serves, and what it had not acknowledged. Every
    method raises ReplayTimeout once heartbeats stay unanswered for `restart_deadline_s`, and
    RefusedByReplay once replay has refused this actor.
    """

    def __init__(
        self,
        endpoint: str,
        hello: wire.Hello,
        heartbeat_s: float,
        dead_after_s: float,
        keys: Keys | None = None,
        restart_deadline_s: float = RESTART_DEADLINE_S,
    ) -> None:
        self.gauges: Callable[[], Mapping[str, float]] = dict
        self._endpoint, self._actor_id, self._keys = endpoint, hello.actor_id, keys
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._restart_deadline_s = restart_deadline_s
        self._inbox, self._session = Inbox(), Session(hello)
        self._silent_s = 0.0  # by heartbeats, since replay was last heard
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)  # while replay is away: its leases' answers, heartbeats
        dealer(self._socket, self._endpoint, self._dead_after_s, self._keys, ACTOR)
        await self._send(self._session.hello(time.monotonic()))
        for work in (self._listen(), self._beat()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            if self._inbox.error is None:
                await self._send(wire.Goodbye(self._actor_id))
        finally:
            self._socket.close(linger=LINGER_MS)
            await asyncio.to_thread(self._context.term)

    async def ready(self, capacity: int, incarnation: int, version: int) -> None:
        """State what this actor can hold in all, and the version it has applied and verified."""
        self._check()
        statement = wire.Ready(self._actor_id, capacity, incarnation, version)
        if self._session.ready(statement):
            await self._send(statement)

    async def next(self) -> wire.Lease | wire.Stop:
        """Wait for the next lease, or Stop (then always Stop), while replay answers heartbeats."""
        return await self._inbox.next()

    async def deliver(self, trajectory: Trajectory) -> str:
        """Send a trajectory; return the status of its acknowledgement once it is on record.

        Waits while heartbeats are answered: replay may be waiting for room on its disk. Raises
        CodecError before anything is sent.
        """
        key = trajectory.group_id, trajectory.sibling
        delivery = wire.Deliver(self._actor_id, *key, encode_trajectory(trajectory))
        status = self._inbox.expect(key)
        self._session.deliver(delivery)
        try:
            await self._send(delivery)
            return await asyncio.shield(status)
        finally:
            self._inbox.forget(key)
            self._session.abandon(key)

    async def fail(self, lease: wire.Lease, cause: str, searches: Sequence[Search] = ()) -> None:
        """Give a lease back, and its searches: infrastructure failed, which is never a reward."""
        key = lease.group_id, lease.sibling
        self._session.held.discard(key)
        instance = self._session.instance
        await self._send(wire.LeaseFailed(self._actor_id, *key, cause, tuple(searches), instance))

    def _check(self) -> None:
        if self._inbox.error is not None:
            raise self._inbox.error

    async def _send(self, message: wire.FromActor) -> bool:
        """Send; False, and the message is lost, where the connection has ended for good."""
        self._check()
        with contextlib.suppress(zmq.Again):
            await self._socket.send(encode(message))
            return True
        return False

    async def _beat(self) -> None:
        # Counted in heartbeats, not in time: a blocked event loop hears nothing, but asks nothing.
        noted = False
        while self._silent_s < self._restart_deadline_s:
            if (silent := self._silent_s >= self._dead_after_s) and not noted:
                logger.warning("%s", self._silence(self._silent_s))
            noted = silent
            if await self._send(self._session.heartbeat(self.gauges())):
                self._silent_s += self._heartbeat_s
            else:
                self._silent_s += self._dead_after_s
                connect_anew(self._socket, self._endpoint)
            await asyncio.sleep(self._heartbeat_s)
        raise self._silence(self._restart_deadline_s)

    async def _listen(self) -> None:
        while True:
            try:
                reply = decode_reply(await self._socket.recv())
            except wire.Garbled as error:
                logger.warning("lost a message of replay's: %s", error)
                continue
            self._silent_s = 0.0
            if isinstance(reply, wire.Unknown):
                await self._introduce(self._session.unknown(time.monotonic()))
            elif isinstance(reply, wire.Alive):
                await self._introduce(self._session.alive(time.monotonic()))
            elif isinstance(reply, wire.Welcome):
                for message in self._session.welcomed():
                    await self._send(message)
            else:
                for lease in self._inbox.take(self._session.hear(reply)):
                    await self.fail(lease, "shutdown")

    async def _introduce(self, hello: wire.Hello | None) -> None:
        if hello is not None:
            leases = len(hello.held) + len(hello.delivering)
            logger.warning("replay does not know this actor: hello again, with %d leases", leases)
            await self._send(hello)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.fail(error)

    def _silence(self, waited_s: float) -> wire.ReplayTimeout:
        return wire.ReplayTimeout(
            f"actor {self._actor_id} waited {waited_s:g} s for the answer to a heartbeat "
            f"from replay at {self._endpoint}"
        )

"""Replay's clients: `TrajectoryWriter` (actors), `BatchReader` (learner), `Observer` (launcher).

Consume leases, batches and status; produce trajectories, requests and heartbeats. They outlive a
replay that is killed and started again on its log: an actor introduces itself anew, the others ask
again. Every wait has a name and a deadline: all give up when replay is silent for
`restart_deadline_s`, the learner also when it is only told to Wait until its own deadline.
"""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import zmq
import zmq.asyncio

import replay.protocol as wire
from configs.keys import Keys
from replay.caller import LINGER_MS, RESTART_DEADLINE_S, Caller, connect_anew, dealer
from replay.codec import decode_reply, encode, encode_trajectory
from replay.inbox import Inbox
from replay.protocol import Lease, ReplayTimeout, Stop
from replay.run_protocol import EvalResult, Observe, Shutdown, Status
from replay.standing import Standing
from replay.trajectory import Search, Trajectory

EVALUATION_POLL_S, LOOK_S = 0.05, 0.1
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
        self._inbox, self._standing = Inbox(), Standing(hello)
        self._silent_s = 0.0  # by heartbeats, since replay was last heard
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)  # while replay is away: its leases' answers, heartbeats
        dealer(self._socket, self._endpoint, self._dead_after_s, self._keys)
        await self._send(self._standing.hello(time.monotonic()))
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
        if self._standing.ready(statement):
            await self._send(statement)

    async def next(self) -> Lease | Stop:
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
        self._standing.deliver(delivery)
        try:
            await self._send(delivery)
            return await asyncio.shield(status)
        finally:
            self._inbox.forget(key)
            self._standing.abandon(key)

    async def fail(self, lease: Lease, cause: str, searches: Sequence[Search] = ()) -> None:
        """Give a lease back, and what it had searched for: infrastructure failed, which is never a
        reward.
        """
        key = lease.group_id, lease.sibling
        self._standing.held.discard(key)
        await self._send(wire.LeaseFailed(self._actor_id, *key, cause, tuple(searches)))

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
            if await self._send(self._standing.heartbeat(self.gauges())):
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
                await self._introduce(self._standing.unknown(time.monotonic()))
            elif isinstance(reply, wire.Alive):
                await self._introduce(self._standing.alive(time.monotonic()))
            elif isinstance(reply, wire.Welcome):
                for message in self._standing.welcomed():
                    await self._send(message)
            else:
                for lease in self._inbox.take(self._standing.hear(reply)):
                    await self.fail(lease, "shutdown")

    async def _introduce(self, hello: wire.Hello | None) -> None:
        if hello is not None:
            leases = len(hello.held) + len(hello.delivering)
            logger.warning("replay does not know this actor: hello again, with %d leases", leases)
            await self._send(hello)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.fail(error)

    def _silence(self, waited_s: float) -> ReplayTimeout:
        return ReplayTimeout(
            f"actor {self._actor_id} waited {waited_s:g} s for the answer to a heartbeat "
            f"from replay at {self._endpoint}"
        )


class BatchReader(Caller):
    """The learner's connection; blocking. `deadline_s` bounds `sample` as a whole, and `resume`.

    `wait_for_batch_s` and `wait_for_oldest_s`: how long the last `sample` waited for
    trajectories, and for an older unfinished group although a batch was ready otherwise.
    """

    def __init__(
        self,
        endpoint: str,
        incarnation: int,
        deadline_s: float,
        reply_deadline_s: float = 10.0,
        keys: Keys | None = None,
        restart_deadline_s: float = RESTART_DEADLINE_S,
    ) -> None:
        super().__init__(endpoint, reply_deadline_s, keys, restart_deadline_s)
        self._incarnation, self._deadline_s = incarnation, deadline_s
        self._instance = uuid.uuid4().hex
        self.wait_for_batch_s = self.wait_for_oldest_s = 0.0

    def resume(self, step: int) -> int | Stop:
        """Say which step is completed; return how many recorded batches come again."""
        what = f"resuming after step {step}"  # replay may fold a long log before it answers
        request = wire.Resume(self._incarnation, step, self._instance)
        raw, _ = self._wait(request, what, self._deadline_s, silence_s=self._deadline_s)
        reply = self._checked(raw, wire.Resumed, what)
        return reply if isinstance(reply, Stop) else reply.recorded_batches

    def sample(self, step: int) -> wire.Batch | Stop:
        """At learner step `step`, wait for the batch that trains step + 1."""
        what = f"the batch of step {step + 1}"
        request = wire.Sample(self._incarnation, step)
        reply, waited_s = self._wait(request, what, self._deadline_s)
        self.wait_for_batch_s, self.wait_for_oldest_s = waited_s[False], waited_s[True]
        return self._checked(reply, wire.Batch, what)

    def evaluate(self, step: int, wait: bool, deadline_s: float | None = None) -> EvalResult | None:
        """Ask for the evaluation at `step`; return its result, or None when unfinished or stopped.

        With `wait`, None means stopped; `deadline_s` (default: the reader's) bounds the whole wait.
        """
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        end_s = time.monotonic() + limit_s
        what = f"the evaluation at step {step}"
        while True:
            request = wire.Evaluate(self._incarnation, step)
            raw, _ = self._wait(request, what, max(0.0, end_s - time.monotonic()))
            reply = self._checked(raw, wire.EvalProgress, what)
            if isinstance(reply, Stop):
                return None
            if reply.result is not None or not wait:
                return reply.result
            progress = f"{reply.done} of {reply.total} rollouts are done"
            if time.monotonic() >= end_s:
                raise self._timeout(what, limit_s, progress)
            self._log(what, progress)
            time.sleep(EVALUATION_POLL_S)

    def report(self, step: int, gauges: Mapping[str, float]) -> None:
        """Hand over the learner's numbers after `step`."""
        request = wire.Report(self._incarnation, step, dict(gauges))
        self._call(request, wire.Done, f"the report of step {step}")

    def committed(self, step: int) -> None:
        """Say that a checkpoint of `step` is durable."""
        request = wire.Committed(self._incarnation, step)
        self._call(request, wire.Done, f"the commitment of step {step}")

    def finish(self, cause: str = "completed") -> None:
        """End the run."""
        self._call(wire.Finish(self._incarnation, cause), wire.Done, "the end of the run")


class Observer(Caller):
    """The launcher's connection; blocking. `gone` says whether replay's process has ended: no
    answer is waited for then.
    """

    gone: Callable[[], bool] = staticmethod(bool)  # nobody has said so

    def status(self, after_step: int = 0, after_evaluation: int = 0) -> Status:
        """How the run stands; steps and evaluations beyond the first so many."""
        reply = self._call(Observe(after_step, after_evaluation), Status, "status")
        assert isinstance(reply, Status)
        return reply

    def shutdown(self, cause: str) -> None:
        """Stop the run: no more leases, no more batches."""
        self._call(Shutdown(cause), wire.Done, "shutdown")

    def _receive(self, limit_s: float) -> wire.Reply | None:
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0.0:
            if self._socket.poll(math.ceil(min(left_s, LOOK_S) * 1000)):
                break
            if self.gone():
                raise self._timeout("an answer", 0.0, "its process has ended")
        return super()._receive(0.0)

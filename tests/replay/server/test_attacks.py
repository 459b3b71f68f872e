"""Messages of somebody with every key, on a real server's socket: each that this run cannot have
come to is refused and counted, and the run trains on as if it had never been said.
"""

import asyncio
from typing import Any

import pytest
import zmq

from configs.keys import LEARNER
from replay.clients.actor import TrajectoryWriter
from replay.clients.learner import BatchReader
from replay.codec import decode_reply, encode
from replay.log.event_log import read
from replay.log.records import EvaluationOpened, GroupOpened, LeaseReturned, QuestionRetired
from replay.protocol import (
    Alive,
    Batch,
    Deliver,
    Evaluate,
    Heartbeat,
    Hello,
    Lease,
    LeaseFailed,
    Ready,
    Refused,
    Reply,
    Resume,
    Sample,
    Unknown,
)

ATTACKS = (
    Resume(2**62, 10**15),
    Resume(2, 10**15),
    Resume(10**6, 0),
    Resume(2, -1),
    Evaluate(1, -1),
    Evaluate(1, 7),
    Sample(1, -2),
    Hello("b", "digest", held=((-5, 0),)),
    Hello("b", "digest", held=((1, 10**9),)),
    Hello("b", "d" * 5000),
    Ready("actor-0", 4, 1, 10**6),
    Ready("actor-0", -1, 1, 0),
    Ready("actor-0", 4, -3, 0),
    Heartbeat("actor-0", {}, Ready("actor-0", 4, 1, 10**6)),
    Heartbeat("actor-0", {f"g{i}": 0.0 for i in range(2000)}),
    Heartbeat("actor-0", {"actor/tokens_per_s": 1e308}),
    Heartbeat("actor-0", {"actor/tokens_per_s": float("-inf")}),
    Deliver("actor-0", 0, 0, b""),
    Deliver("actor-0", -3, 0, b""),
    LeaseFailed("actor-0", 1, -1, "bad"),
    LeaseFailed("actor-0", 1, 0, "x" * 100_000),
)


def replies(running: Any, messages: tuple[Any, ...]) -> list[Any]:
    """What a stranger is told of each."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if running.keys:
            running.keys.present(socket, LEARNER)
        socket.connect(running.endpoint)
        found = []
        for message in messages:
            socket.send(encode(message))
            reply: Reply = Alive()
            while isinstance(reply, Alive):  # heartbeats get one too, and actors that are silent
                assert socket.poll(20_000), message
                reply = decode_reply(socket.recv())
            found.append(reply)
        return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
async def test_whoever_says_what_cannot_be_changes_nothing(serve, rollout, tcp: bool) -> None:
    running = serve(tcp=tcp, max_staleness=1, max_question_failures=2)
    hello = Hello("actor-0", "digest")
    with BatchReader(running.endpoint, 1, 20.0, keys=running.keys) as learner:
        learner.resume(0)
        writer = TrajectoryWriter(running.endpoint, hello, 0.05, 20.0, keys=running.keys)
        async with writer as actor:
            await actor.ready(4, 1, 0)
            leases = [await asyncio.wait_for(actor.next(), 20.0) for _ in range(4)]
            said = await asyncio.to_thread(replies, running, ATTACKS)
            assert [
                (a, r) for a, r in zip(ATTACKS, said, strict=True) if type(r) is not Refused
            ] == []
            assert running.server.gauges()["replay/refused_messages"] == len(ATTACKS)
            held = [LeaseFailed("actor-0", x.group_id, x.sibling, "it is bad") for x in leases]
            assert await asyncio.to_thread(replies, running, tuple(held)) == [Unknown()] * 4
            for lease in leases:
                assert isinstance(lease, Lease)
                assert await actor.deliver(rollout(lease)) == "accepted"
            assert isinstance(await asyncio.to_thread(learner.sample, 0), Batch)
            running.end()
    facts = list(read(running.log_path))
    assert sum(isinstance(fact, GroupOpened) for fact in facts) == 2
    folded = (EvaluationOpened, LeaseReturned, QuestionRetired)
    assert not [fact for fact in facts if isinstance(fact, folded)]

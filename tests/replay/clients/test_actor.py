"""The clients against a real server, and against one that says nothing."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from replay.clients.actor import TrajectoryWriter
from replay.clients.base import is_late
from replay.clients.launcher import Observer
from replay.clients.learner import BatchReader
from replay.codec import decode_request, decode_trajectory, encode
from replay.log.event_log import EventLog, read, read_whole
from replay.log.records import Delivered, Leased, LeaseReturned
from replay.protocol import (
    Batch,
    BatchPart,
    Done,
    EvalProgress,
    EvalResult,
    Evaluate,
    Hello,
    Lease,
    RefusedByReplay,
    ReplayTimeout,
    Reply,
    Report,
    Resumed,
    Sample,
    SamplePart,
    Status,
    Stop,
    Unknown,
    Wait,
)
from tests.lived import lived


def writer(
    endpoint: str, actor_id: str = "actor-0", dead_after_s: float = 20.0, **limits: float
) -> TrajectoryWriter:
    hello = Hello(actor_id, "digest")
    limits = {"restart_deadline_s": dead_after_s} | limits
    return TrajectoryWriter(endpoint, hello, 0.05, dead_after_s, **limits)  # type: ignore[arg-type]


@pytest.fixture
def learner(serve) -> Callable[..., BatchReader]:
    readers: list[BatchReader] = []

    def make(running, incarnation: int = 1, deadline_s: float = 5.0) -> BatchReader:
        readers.append(BatchReader(running.endpoint, incarnation, deadline_s))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


@pytest.fixture
def silence() -> Iterator[str]:
    """An endpoint that takes everything and answers nothing."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    yield f"tcp://127.0.0.1:{port}"
    context.destroy(linger=0)


async def take(actor: TrajectoryWriter, count: int = 2) -> list[Lease]:
    items = [await asyncio.wait_for(actor.next(), 15.0) for _ in range(count)]
    assert all(isinstance(item, Lease) for item in items)
    return items  # type: ignore[return-value]


async def test_lease_deliver_sample(serve, learner, rollout) -> None:
    running = serve()
    trainer = learner(running)
    assert trainer.resume(0) == 0
    async with writer(running.endpoint) as actor:
        await actor.ready(2, 1, 0)
        for lease in await take(actor):
            assert await actor.deliver(rollout(lease)) == "accepted"
            assert await actor.deliver(rollout(lease)) == "superseded"
        batch = trainer.sample(0)
    assert [decode_trajectory(p).sibling for p in batch.groups[0]] == [0, 1]
    trainer.report(1, {"learner/loss": 0.5})
    trainer.committed(1)


async def test_acknowledged_is_on_record(serve, learner, rollout) -> None:
    running = serve()
    learner(running).resume(0)
    async with writer(running.endpoint) as actor:
        await actor.ready(2, 1, 0)
        await actor.deliver(rollout((await take(actor))[0]))
        assert sum(isinstance(r, Delivered) for r in read(running.log_path)) == 1


async def test_failed_lease_is_leased_again(serve, learner) -> None:
    running = serve(max_staleness=0)
    learner(running).resume(0)
    async with writer(running.endpoint) as actor:
        await actor.ready(2, 1, 0)
        lease, _ = await take(actor)
        await actor.fail(lease, "engine abort")
        assert await take(actor, 1) == [msgspec.structs.replace(lease, attempt=1)]


async def test_gauges_travel_with_heartbeats(serve) -> None:
    running = serve()
    async with writer(running.endpoint) as actor:
        actor.gauges = lambda: {"actor/tokens_per_s": 7.0}
        with Observer(running.endpoint) as console:
            while not (fleet := console.status().fleet.get("actor-0")):
                await asyncio.sleep(0.02)
    assert fleet == {"actor/tokens_per_s": 7.0}


async def test_stop_returns_what_was_not_begun(serve, learner) -> None:
    running = serve()
    learner(running).resume(0)
    async with writer(running.endpoint) as actor:
        await actor.ready(2, 1, 0)
        await asyncio.wait_for(until(lambda: kept(running.log_path, Leased)), 15.0)
        with Observer(running.endpoint) as console:
            console.shutdown("enough")
            assert console.status().stop_cause == "enough"
        await asyncio.wait_for(until(lambda: len(kept(running.log_path, LeaseReturned)) == 2), 15.0)
        for _ in range(2):
            assert await asyncio.wait_for(actor.next(), 15.0) == Stop("enough")
    assert learner(running, 2).resume(0) == Stop("enough")
    assert returned(running.log_path) == {"shutdown"}


async def test_silent_replay_is_named_by_next(silence: str) -> None:
    async with writer(silence, dead_after_s=0.2) as actor:
        with pytest.raises(ReplayTimeout, match=rf"actor-0 waited 0\.2 s .*{silence}"):
            await asyncio.wait_for(actor.next(), 15.0)
        with pytest.raises(ReplayTimeout):
            await actor.ready(1, 1, 0)


async def test_silent_replay_is_named_by_deliver(silence: str, rollout, serve, learner) -> None:
    running = serve()
    learner(running).resume(0)
    async with writer(running.endpoint) as actor:
        await actor.ready(2, 1, 0)
        lease = (await take(actor))[0]
    async with writer(silence, dead_after_s=0.2) as actor:
        with pytest.raises(ReplayTimeout, match="waited"):
            await actor.deliver(rollout(lease))


@pytest.mark.slow
async def test_blocked_event_loop_is_not_taken_for_a_silent_replay(serve) -> None:
    running = serve()
    async with writer(running.endpoint, dead_after_s=1.0) as actor:
        with Observer(running.endpoint) as console:
            while not console.status().fleet:  # its Hello is on the disk, however slow that is
                await asyncio.sleep(0.02)
        threading.Event().wait(1.4)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(actor.next(), 0.5)


async def test_error_in_gauges_is_raised_where_the_actor_waits(serve) -> None:
    async with writer(serve().endpoint) as actor:
        actor.gauges = lambda: {"x": 1 / 0}
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(actor.next(), 15.0)


async def test_second_actor_of_one_id_is_refused(serve, learner) -> None:
    running = serve()
    learner(running).resume(0)
    async with writer(running.endpoint) as first:
        await first.ready(2, 1, 0)
        await take(first)  # it is known before the second one speaks
        async with writer(running.endpoint) as second:
            with pytest.raises(RefusedByReplay, match="connected already"):
                await asyncio.wait_for(second.next(), 15.0)


def returned(log_path: Path) -> set[str]:
    """Return the causes for which leases were given back."""
    return {record.cause for record in kept(log_path, LeaseReturned)}


def kept(log_path: Path, kind: type) -> list[Any]:
    """Return the records of this kind so far: the server may be writing."""
    return [record for record in read_whole(log_path) if isinstance(record, kind)]


async def until(true: Callable[[], object]) -> None:
    """Wait until `true` says so."""
    while not true():
        await asyncio.sleep(0.02)


async def test_goodbye_returns_leases(serve, learner) -> None:
    running = serve()
    learner(running).resume(0)
    async with writer(running.endpoint) as actor:
        await actor.ready(2, 1, 0)
        await take(actor)
    # The goodbye travels on its own.
    await asyncio.wait_for(until(lambda: returned(running.log_path)), 10.0)
    assert returned(running.log_path) == {"goodbye"}
    async with writer(running.endpoint, "actor-1") as other:
        await other.ready(2, 1, 0)
        await take(other)


async def test_a_goodbye_counts_though_its_connection_is_found_dead_first(serve, learner) -> None:
    writing = threading.Event()
    writing.set()

    class Disk(EventLog):
        def sync(self) -> None:
            assert writing.wait(60.0)
            super().sync()

    running = serve(Disk)
    learner(running).resume(0)
    async with writer(running.endpoint, "actor-1") as other:
        async with writer(running.endpoint) as actor:
            await actor.ready(2, 1, 0)
            await take(actor)
            writing.clear()
            await other.ready(2, 1, 0)  # its leases go on record, which lasts
            await asyncio.sleep(0.3)  # actor-0's heartbeats wait for answers
        await asyncio.sleep(0.3)  # actor-0 is gone: no answer reaches it
        writing.set()
        await take(other)
        await asyncio.wait_for(until(lambda: returned(running.log_path)), 15.0)
    assert returned(running.log_path) == {"goodbye"}


async def test_evaluation_is_waited_for(serve, learner, rollout) -> None:
    running = serve(max_staleness=0)
    trainer = learner(running)
    trainer.resume(0)
    assert trainer.evaluate(0, wait=False) is None
    async with writer(running.endpoint) as actor:
        await actor.ready(2, 1, 0)
        for lease in await take(actor):
            assert lease.kind == "eval"
            await actor.deliver(rollout(lease))
        result = trainer.evaluate(0, wait=True)
    assert result is not None
    assert (result.questions, result.em, result.sampled_em) == (1, 1.0, 1.0)


def test_unfinished_evaluation_passes_its_deadline(serve, learner) -> None:
    trainer = learner(serve())
    trainer.resume(0)
    with pytest.raises(ReplayTimeout, match=r"evaluation at step 0 .*: 0 of 2 rollouts are done"):
        trainer.evaluate(0, wait=True, deadline_s=0.15)


def test_sample_deadline_says_who_is_waited_for(serve, learner, caplog) -> None:
    caplog.set_level(logging.INFO)
    trainer = learner(serve(), deadline_s=1.0)
    trainer.resume(0)
    with pytest.raises(ReplayTimeout, match=r"batch of step 1 .*0 of 1 groups"):
        trainer.sample(0)
    said = [record.message for record in caplog.records if record.name == is_late.__module__]
    assert len(said) == 1
    assert said[0].startswith("waiting for the batch of step 1: ")
    assert trainer.evaluate(0, wait=False) is None  # the connection is of use again


async def test_waits_are_counted(serve, learner, rollout) -> None:
    running = serve()
    trainer = learner(running)
    trainer.resume(0)
    async with writer(running.endpoint) as actor:
        await actor.ready(2, 1, 0)
        for step in range(3):
            begun_s = time.monotonic()
            sampling = asyncio.create_task(asyncio.to_thread(trainer.sample, step))
            leases = await take(actor)
            await asyncio.sleep(0.4)
            for lease in leases:
                await actor.deliver(rollout(lease))
            assert (await sampling).step == step + 1
            assert 0.2 <= trainer.wait_for_batch_s <= time.monotonic() - begun_s
            assert trainer.wait_for_oldest_s == 0.0


def test_older_incarnation_is_refused(serve, learner) -> None:
    running = serve()
    old, new = learner(running, 1), learner(running, 2)
    old.resume(0)
    new.resume(0)
    for act in (old.sample, old.committed, old.resume):
        with pytest.raises(RefusedByReplay, match="incarnation 1"):
            act(0)
    with pytest.raises(RefusedByReplay, match="incarnation 1"):
        old.finish()


def test_finish_stops_everybody(serve, learner) -> None:
    running = serve()
    trainer = learner(running)
    trainer.resume(0)
    trainer.finish("completed")
    assert trainer.sample(0) == Stop("completed")
    assert trainer.evaluate(0, wait=True) is None


async def test_a_connection_that_ends_while_a_question_is_sent_is_made_anew(
    serve, learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken handshake or stream may end it between looking and sending."""
    trainer = learner(serve())
    broken, send = trainer._socket, zmq.Socket.send

    def sent(socket: "zmq.Socket[bytes]", *message: Any, **how: Any) -> Any:
        if socket is broken:
            raise zmq.Again
        return send(socket, *message, **how)

    monkeypatch.setattr(zmq.Socket, "send", sent)
    assert await asyncio.to_thread(trainer.resume, 0) == 0
    assert trainer._socket is not broken


async def test_silent_replay_is_named_to_the_learner(silence: str) -> None:
    words = rf"resuming after step 3 .*{silence}: no answer"
    with BatchReader(silence, 1, 0.1) as trainer, pytest.raises(ReplayTimeout, match=words):
        trainer.resume(3)


def test_replay_may_fold_a_long_log_before_it_answers_a_resume(tmp_path) -> None:
    endpoint, over = f"ipc://{tmp_path}/folding", threading.Event()
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as folding, BatchReader(endpoint, 1, 5.0, 0.1) as late:

        def answer() -> None:
            folding.bind(endpoint)
            answer_until(over, folding, encode(Resumed(2)))

        timer = threading.Timer(0.4, answer)
        timer.start()
        try:
            assert late.resume(3) == 2
        finally:
            over.set()
            timer.join()


def answer_until(over: threading.Event, socket: "zmq.Socket[bytes]", reply: bytes) -> None:
    """Answer each message: whoever sent the first may have given it up."""
    while not over.is_set():
        if socket.poll(20):
            socket.send_multipart((socket.recv_multipart()[0], reply))


def test_silent_replay_is_named_to_the_launcher(silence: str, caplog) -> None:
    caplog.set_level(logging.INFO)
    words = rf"waited ([\d.]+) s for status from replay at {silence}: no answer"
    begun_s = time.monotonic()
    with (
        Observer(silence, 0.1, restart_deadline_s=0.0) as console,
        lived() as lived_s,
        pytest.raises(ReplayTimeout, match=words) as found,
    ):
        console.status()
    waited = re.search(words, str(found.value))
    assert waited and 0.1 <= float(waited[1]) <= time.monotonic() - begun_s + 0.05  # in tenths
    assert lived_s() < 0.5
    assert "waiting for status" not in caplog.text, "it asks once"


def test_a_silent_replay_is_asked_again_until_the_deadline(silence: str, caplog) -> None:
    caplog.set_level(logging.INFO)
    words = rf"waited ([\d.]+) s for status from replay at {silence}: no answer"
    with (
        Observer(silence, 0.1, restart_deadline_s=0.5) as console,
        lived() as lived_s,
        pytest.raises(ReplayTimeout, match=words) as found,
    ):
        console.status()
    waited = re.search(words, str(found.value))
    assert waited and float(waited[1]) >= 0.5 and lived_s() < 1.0
    assert "waiting for status: no answer for 0." in caplog.text


@pytest.mark.slow
def test_late_reply_is_not_taken_for_the_next_one_s(tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/late"
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as slow, _hasty(endpoint) as console:
        slow.bind(endpoint)
        with pytest.raises(ReplayTimeout):
            console.status()
        asked = slow.recv_multipart()[0]
        slow.send_multipart((asked, encode(status_of("late"))))

        def answer() -> None:
            slow.send_multipart((slow.recv_multipart()[0], encode(status_of("fresh"))))

        timer = threading.Timer(0.1, answer)
        timer.start()
        assert console.status().phase == "fresh"
        timer.join()


def _hasty(endpoint: str) -> Observer:
    return Observer(endpoint, 1.5, restart_deadline_s=0.0)


def test_a_request_is_repeated_to_a_replay_that_comes_back(tmp_path) -> None:
    endpoint, over = f"ipc://{tmp_path}/back", threading.Event()
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as back, Observer(endpoint, 0.1) as console:

        def answer() -> None:
            back.bind(endpoint)
            back.recv_multipart()  # lost with a replay that was killed
            answer_until(over, back, encode(status_of("back")))

        timer = threading.Timer(0.4, answer)
        timer.start()
        try:
            assert console.status().phase == "back"
        finally:
            over.set()
            timer.join()


def status_of(phase: str) -> Status:
    return Status((), (), {}, {}, phase, "")


def answering(endpoint: str, *answers: bytes) -> threading.Thread:
    """Something at `endpoint` that answers each message with all that is said here."""

    def answer() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 500
            socket.bind(endpoint)
            for reply in answers:
                asked = socket.recv_multipart()[0]
                socket.send_multipart((asked, reply))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize("lost", [encode(status_of("x"))[:-1] + b"?", encode(Unknown())])
def test_what_was_garbled_on_the_way_is_asked_again(tmp_path, lost: bytes) -> None:
    endpoint = f"ipc://{tmp_path}/garbled"
    thread = answering(endpoint, lost, encode(status_of("whole")))
    with Observer(endpoint, 1.0) as console:
        assert console.status().phase == "whole"
    thread.join()


def test_an_answer_to_an_earlier_question_is_nobodys() -> None:
    batch = Batch(4, (), (), (), {}, {}, ())
    assert is_late(Sample(1, 4), batch) and not is_late(Sample(1, 3), batch)
    assert is_late(Report(1, 4, {}), batch) and not is_late(Report(1, 4, {}), Done())
    assert is_late(Sample(1, 4), Done()) and not is_late(Sample(1, 4), Stop("over"))
    result = EvalResult(4, 1, 1.0, 1.0, {}, {}, 1.0, 4, 4)
    assert is_late(Evaluate(1, 8), EvalProgress(2, 2, result))
    assert not is_late(Evaluate(1, 4), EvalProgress(2, 2, result))
    assert not is_late(Evaluate(1, 8), EvalProgress(0, 2, None))


@pytest.mark.parametrize("reply", [BatchPart(1, 0, (b"x",)), Wait("it is slow", oldest=False)])
def test_the_parts_of_a_batch_have_what_is_left_of_its_deadline(tmp_path, reply: Reply) -> None:
    endpoint, bound, over = f"ipc://{tmp_path}/parts", threading.Event(), threading.Event()
    batch = Batch(1, (1,), (0,), (), {}, {}, (), parts=9, sizes=(9,))

    def answer() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(endpoint)
            bound.set()
            while not over.is_set():
                if socket.poll(20):
                    asker, asked = socket.recv_multipart()
                    match decode_request(asked):
                        case SamplePart(_, _, part) if isinstance(reply, BatchPart):
                            time.sleep(0.5)
                            said: Reply = msgspec.structs.replace(reply, part=part)
                        case SamplePart():
                            said = reply
                        case _:
                            said = batch
                    socket.send_multipart((asker, encode(said)))

    thread = threading.Thread(target=answer)
    thread.start()
    words = r"waited [\d.]+ s for part \d of 9 of the batch of step 1"
    try:
        assert bound.wait(30.0)
        with BatchReader(endpoint, 1, 2.0, 1.0) as late, pytest.raises(ReplayTimeout, match=words):
            late.sample(0)
    finally:
        over.set()
        thread.join()

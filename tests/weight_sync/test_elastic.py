"""Actors and learners come and go: the others go on, and who comes gets the newest version."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import msgspec
import pytest
import torch

from configs.keys import Keys
from tests.faults.tcp_proxy import ChaosProxy, Faults
from tests.weight_sync.conftest import PROBE, score
from weight_sync import control
from weight_sync.protocol import EngineDiffers, Rendezvous, SyncTimeout, WeightSyncError
from weight_sync.publisher import Publisher
from weight_sync.transports.collective import GlooTransport


async def wait_applied(publisher: Publisher, version: int, deadline_s: float = 30.0) -> None:
    await asyncio.to_thread(publisher.wait_applied, version, deadline_s)


async def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30.0
    while not reached():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_killed_actor_is_no_reason_to_wait_and_comes_back(fleet, start) -> None:
    engine = fleet.add("actor-0")
    doomed = start("actor-1")
    with fleet.publisher(2) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 60)
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        doomed.kill()
        doomed.wait()
        weights = fleet.publish(publisher, 1)
        await wait_applied(publisher, 1)
        assert torch.equal(engine.weights["head"], weights["head"])
        start("actor-1")
        await wait_until(lambda: len(publisher._channel.joined) == 2, "it joins again")
        fleet.publish(publisher, 2)
        await wait_applied(publisher, 2)
        assert fleet.subscribers[0].verified == (7, 2)


async def test_an_actor_that_dies_while_the_group_forms_is_no_reason_to_wait(
    fleet, monkeypatch
) -> None:
    """Gloo itself would wait for it until the deadline."""
    fleet.add("actor-0"), fleet.add("actor-1")
    patient = msgspec.structs.replace(fleet.config, publish_deadline_s=60.0)
    loop, join, over = asyncio.get_running_loop(), GlooTransport.join, threading.Event()

    def dies(rendezvous: Rendezvous) -> GlooTransport:
        if rendezvous.rank == 2:
            time.sleep(0.5)  # it says Connecting first
            loop.call_soon_threadsafe(fleet.tasks[1].cancel)
            over.wait(60.0)
        return join(rendezvous)

    monkeypatch.setattr(GlooTransport, "join", dies)
    try:
        with fleet.publisher(2, patient) as publisher:
            await asyncio.to_thread(publisher.wait_for_actors, 20)
            fleet.publish(publisher, 0)
            await wait_applied(publisher, 0, 40.0)
            assert fleet.subscribers[0].verified == (7, 0)
            assert list(publisher._channel.joined) == ["actor-0"]
    finally:
        over.set()


@pytest.mark.slow
async def test_a_stopped_actor_is_dropped_at_the_deadline_and_catches_up(fleet, start) -> None:
    fleet.add("actor-0")
    stopped = start("actor-1")
    config = msgspec.structs.replace(fleet.config, publish_deadline_s=1.0)
    with fleet.publisher(2, config) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 60)
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        stopped.send_signal(signal.SIGSTOP)
        fleet.publish(publisher, 1)
        await wait_applied(publisher, 1)
        assert fleet.subscribers[0].verified == (7, 1)
        stopped.send_signal(signal.SIGCONT)
        await wait_until(lambda: len(publisher._channel.joined) == 2, "it joins again")
        fleet.publish(publisher, 2)
        await wait_applied(publisher, 2)


async def test_whoever_joins_late_catches_up_and_the_others_notice_nothing(fleet) -> None:
    first = fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        weights = fleet.publish(publisher, 1)
        await wait_applied(publisher, 1)
        before = list(first.calls)
        late = fleet.add("actor-1")
        await wait_until(lambda: fleet.subscribers[1].verified == (7, 1), "it catches up")
        assert torch.equal(late.weights["head"], weights["head"]) and first.calls == before
        fleet.publish(publisher, 2)
        await wait_applied(publisher, 2)
        assert [each.verified for each in fleet.subscribers] == [(7, 2), (7, 2)]
        assert publisher.gauges()["sync/updates"] == 3 - publisher.gauges()["sync/overtaken"]


@pytest.mark.slow
async def test_with_nobody_left_the_next_to_come_gets_the_newest(fleet, start) -> None:
    only = start("actor-0")
    with fleet.publisher(1) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 60)
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        only.kill()
        only.wait()
        fleet.publish(publisher, 1)
        with pytest.raises(SyncTimeout, match="an actor to join: none is left"):
            await wait_applied(publisher, 1, 3.0)
        fleet.add("actor-0")
        await wait_applied(publisher, 1)
        assert fleet.subscribers[0].verified == (7, 1)


async def test_a_learner_that_starts_anew_finds_its_actors(fleet) -> None:
    engines = [fleet.add("actor-0"), fleet.add("actor-1")]
    with fleet.publisher(2) as publisher:
        fleet.publish(publisher, 5)
        await wait_applied(publisher, 5)
    with Publisher(fleet.config, 2, 8, fleet.endpoint) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        assert all(each.serving.is_set() for each in fleet.subscribers)
        weights = fleet.publish(publisher, 3)
        await wait_applied(publisher, 3)
        assert [each.verified for each in fleet.subscribers] == [(8, 3), (8, 3)]
        assert all(torch.equal(each.weights["embed"], weights["embed"]) for each in engines)


async def test_bytes_that_never_come_leave_what_serves(fleet, monkeypatch) -> None:
    """The group breaks after `Sent`, on one actor's side only."""
    engines = [fleet.add("actor-0"), fleet.add("actor-1")]
    with fleet.publisher(2) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        broadcast, broken = GlooTransport.broadcast, []

        def breaks(transport: GlooTransport, staging: list[torch.Tensor], seconds: float) -> None:
            broadcast(transport, staging, seconds)
            if transport.rendezvous.rank == 2 and not broken:
                broken.append(list(engines[1].calls))
                staging[0].zero_()
                raise SyncTimeout("the bytes were lost")

        monkeypatch.setattr(GlooTransport, "broadcast", breaks)
        weights = fleet.publish(publisher, 1)
        await wait_applied(publisher, 1)
        await wait_until(lambda: fleet.subscribers[1].verified == (7, 1), "it gets them again")
        assert broken and fleet.subscribers[1].serving.is_set()
        assert all(torch.equal(each.weights["head"], weights["head"]) for each in engines)
        assert engines[1].calls.count("resume") == engines[1].calls.count("pause")


async def test_an_actor_s_name_is_taken_while_its_holder_lives(fleet, monkeypatch) -> None:
    monkeypatch.setattr(control, "_RIVAL_S", 0.5)
    fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        fleet.add("actor-0")
        with pytest.raises(WeightSyncError, match="named 'actor-0' has joined already"):
            await asyncio.wait_for(fleet.tasks[1], 30)
        fleet.publish(publisher, 1)
        await wait_applied(publisher, 1)


@pytest.mark.slow
async def test_who_joins_before_there_is_a_version_waits_while_the_learner_lives(fleet) -> None:
    fleet.add("actor-0", msgspec.structs.replace(fleet.config, join_deadline_s=2.5))
    with fleet.publisher(1) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        await asyncio.sleep(3.0)
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)


async def unanswered(tokens: list[int]) -> None:
    await asyncio.Event().wait()


@pytest.mark.slow
async def test_weights_that_nobody_verified_do_not_serve_after_a_broken_broadcast(
    fleet, monkeypatch
) -> None:
    engine = fleet.add("actor-0")
    config = msgspec.structs.replace(fleet.config, publish_deadline_s=0.5)
    with fleet.publisher(1, config) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        broadcast, subscriber = GlooTransport.broadcast, fleet.subscribers[0]
        loaded: list[int] = []
        subscriber.on_loaded = lambda version, _: loaded.append(version)
        subscriber._config = config
        score, engine.score = engine.score, unanswered
        fleet.publish(publisher, 1)
        await wait_until(lambda: 1 in loaded, "version 1 is loaded")
        lost = []

        def breaks(transport: GlooTransport, staging: list[torch.Tensor], seconds: float) -> None:
            broadcast(transport, staging, seconds)
            if transport.rendezvous.rank and not lost:
                lost.append(subscriber.serving.is_set())
                raise SyncTimeout("the bytes were lost")

        monkeypatch.setattr(GlooTransport, "broadcast", breaks)
        await wait_until(lambda: bool(lost), "version 1 is sent again, and lost")
        await asyncio.sleep(0.3)
        assert not subscriber.serving.is_set() or subscriber.verified == (7, 1)
        engine.score = score
        await wait_applied(publisher, 1)
        assert subscriber.verified == (7, 1) and subscriber.serving.is_set()


async def test_a_stranger_is_refused_and_the_others_go_on(fleet) -> None:
    fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        fleet.add("actor-1").weights["head"] = torch.zeros(9, 4)
        with pytest.raises(WeightSyncError, match="refused: ManifestMismatch: 1 tensors differ"):
            await asyncio.wait_for(fleet.tasks[1], 20)
        fleet.publish(publisher, 1)
        await wait_applied(publisher, 1)


def another_model(values: list[float]) -> list[float]:
    """What an engine answers that computes another model."""
    return [value - 1.0 for value in values]


async def test_an_engine_of_another_model_that_comes_late_is_refused_alone(fleet) -> None:
    first = fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        publisher.calibrate(score(first.weights, PROBE))
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        fleet.add("actor-1").scored = another_model
        with pytest.raises(
            WeightSyncError, match=r"refused: EngineDiffers: .*\(actor-1, version 0"
        ):
            await asyncio.wait_for(fleet.tasks[1], 20)
        fleet.publish(publisher, 1)
        await wait_applied(publisher, 1)
        assert publisher.gauges()["sync/refused"] == 1.0


async def test_a_learner_that_starts_anew_refuses_it_alone_too(fleet) -> None:
    engine = fleet.add("actor-0")
    start_logprobs = score(engine.weights, PROBE)
    with fleet.publisher(1) as publisher:
        publisher.calibrate(start_logprobs)
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
    fleet.add("actor-1").scored = another_model
    with Publisher(fleet.config, 2, 8, fleet.endpoint) as publisher:
        publisher.calibrate(start_logprobs)
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        assert fleet.subscribers[0].verified == (8, 0)
        with pytest.raises(WeightSyncError, match="refused: EngineDiffers: "):
            await asyncio.wait_for(fleet.tasks[1], 20)


async def test_a_fleet_whose_engines_all_come_back_as_another_model_ends_the_run(fleet) -> None:
    engine = fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        publisher.calibrate(score(engine.weights, PROBE))
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        await fleet.stop()
        fleet.add("actor-0").scored = another_model
        fleet.publish(publisher, 1)
        with pytest.raises(EngineDiffers, match="actor-0, version"):
            await wait_applied(publisher, 1)


@pytest.mark.slow
async def test_a_control_connection_that_is_slow_and_cut_again_and_again_heals(
    fleet, tmp_path
) -> None:
    """Cuts fall before, between and after the messages of a version, which arrives all the same."""
    with ExitStack() as ports:
        free = [ports.enter_context(closing(socket.socket())) for _ in range(2)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        direct, proxied = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in free)
    fleet.keys = Keys(tmp_path / "keys").make()
    fleet.endpoint = direct
    config = msgspec.structs.replace(fleet.config, publish_deadline_s=2.0)
    with fleet.publisher(2, config) as publisher:
        near = fleet.add("actor-0")
        async with ChaosProxy(proxied, direct, Faults(delay_s=0.01)) as proxy:
            fleet.endpoint = proxied
            far = fleet.add("actor-1")
            await asyncio.to_thread(publisher.wait_for_actors, 20)
            for version in range(4):
                weights = fleet.publish(publisher, version)
                await asyncio.sleep(0.03 * version)
                proxy.cut()
                await asyncio.sleep(0)  # it is done by the loop
                await wait_until(
                    lambda: all(s.verified == (7, version) for s in fleet.subscribers),  # noqa: B023
                    f"version {version} reaches both",
                )
                assert all(torch.equal(e.weights["head"], weights["head"]) for e in (near, far))
            assert proxy.cuts == 4

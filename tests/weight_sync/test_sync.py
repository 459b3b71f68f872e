"""Publisher and subscribers over a real ipc socket and real gloo, around bare engines."""

import asyncio
import socket
from contextlib import closing

import msgspec
import pytest
import torch
import zmq

from configs.keys import Keys
from configs.schema import WeightSyncConfig
from tests.weight_sync.conftest import PROBE, score
from weight_sync.protocol import (
    Applied,
    EngineDiffers,
    ManifestMismatch,
    SyncTimeout,
    VerificationFailed,
    WeightSyncError,
)
from weight_sync.publisher import Publisher


async def wait_applied(publisher: Publisher, version: int, deadline_s: float = 30.0) -> None:
    await asyncio.to_thread(publisher.wait_applied, version, deadline_s)


async def test_each_version_reaches_every_actor(fleet) -> None:
    engines = [fleet.add("actor-0"), fleet.add("actor-1")]
    noted = list[Applied]()
    with fleet.publisher(2, noted=noted.append) as publisher:
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        for version in range(4):
            weights = fleet.publish(publisher, version)
            await wait_applied(publisher, version)
            for engine, subscriber in zip(engines, fleet.subscribers, strict=True):
                assert all(torch.equal(engine.weights[name], weights[name]) for name in weights)
                assert subscriber.verified == (7, version) and subscriber.serving.is_set()
        gauges = publisher.gauges()
    assert gauges["sync/updates"] == 4 and gauges["sync/probe_error"] < 1e-6
    told = sorted((each.policy_version, each.actor_id) for each in noted)
    assert told == [(version, f"actor-{n}") for version in range(4) for n in range(2)]
    assert fleet.subscribers[0].gauges()["sync/policy_version"] == 3


async def test_order_of_one_update(fleet) -> None:
    engine = fleet.add("actor-0")
    serving: list[bool] = []
    engine.scored = lambda values: serving.append(fleet.subscribers[0].serving.is_set()) or values
    fleet.subscribers[0].on_verified = lambda *version: engine.calls.append(f"verified {version}")
    with fleet.publisher(1) as publisher:
        for version in range(2):
            fleet.publish(publisher, version)
            await wait_applied(publisher, version)
    update = ["receive", "pause", "apply", "version 1", "score", "resume", "verified (7, 1)"]
    assert engine.calls[-7:] == update
    assert serving == [False, False], "while the probe runs nothing may be delivered"


async def test_a_wrong_probe_names_actor_and_version(fleet) -> None:
    fleet.add("actor-0")
    broken = fleet.add("actor-1")
    with fleet.publisher(2) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        broken.scored = lambda values: [value + 0.01 for value in values]
        fleet.publish(publisher, 1)
        with pytest.raises(VerificationFailed, match=r"largest 0\.01; .*actor-1, version 1"):
            await wait_applied(publisher, 1)
        with pytest.raises(VerificationFailed):
            fleet.publish(publisher, 2)
    assert not fleet.subscribers[1].serving.is_set()
    assert fleet.subscribers[1].verified == (7, 0)


async def test_a_probe_that_is_not_a_number_fails(fleet) -> None:
    fleet.add("actor-0").scored = lambda values: [float("nan")] * len(values)
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        with pytest.raises(VerificationFailed, match="mean nan, p90 nan, largest nan"):
            await wait_applied(publisher, 0)


def rounded(values: list[float]) -> list[float]:
    """What kernels of bf16 make of log-probs: here .02 nats off, and one of them .3."""
    return [value + (0.3 if k == 0 else 0.02 * (-1) ** k) for k, value in enumerate(values)]


async def test_an_engine_that_rounds_otherwise_is_judged_by_its_own_start(fleet) -> None:
    engine = fleet.add("actor-0")
    engine.scored = rounded
    with fleet.publisher(1) as publisher:
        publisher.calibrate(score(engine.weights, PROBE))  # both have loaded the same file
        for version in range(3):
            fleet.publish(publisher, version)
            await wait_applied(publisher, version)
        gauges = fleet.subscribers[0].gauges()
        assert gauges["sync/probe_error"] == pytest.approx(0.3, abs=1e-3)
        assert gauges["sync/probe_mean"] == pytest.approx(0.09, abs=1e-3)


async def test_a_tensor_that_stays_old_is_seen_where_rounding_is_let_pass(fleet) -> None:
    engine = fleet.add("actor-0")
    engine.scored = rounded
    stale = engine.weights["head"].clone()
    with fleet.publisher(1) as publisher:
        publisher.calibrate(score(engine.weights, PROBE))
        engine.scored = lambda values: rounded(
            score({**engine.weights, "head": stale}, PROBE) if engine.version >= 0 else values
        )
        fleet.publish(publisher, 0)
        with pytest.raises(VerificationFailed, match=r"not the learner.s: .*; allowed "):
            await wait_applied(publisher, 0)


async def test_an_engine_that_computes_another_model_ends_the_run_before_any_load(fleet) -> None:
    engine = fleet.add("actor-0")
    engine.scored = lambda values: [value - 1.0 for value in values]
    with fleet.publisher(1) as publisher:
        publisher.calibrate(score(engine.weights, PROBE))
        fleet.publish(publisher, 0)
        with pytest.raises(EngineDiffers, match=r"mean 1, .*model\.dtype.*actor-0, version 0"):
            await wait_applied(publisher, 0)
    assert "apply" not in engine.calls


async def test_another_model_is_refused_before_any_byte(fleet) -> None:
    fleet.add("actor-0").weights["head"] = torch.zeros(9, 4)
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        said = r"'head': learner float32\[8, 4\], actor float32\[9, 4\].*actor-0, version 0"
        with pytest.raises(ManifestMismatch, match=said):
            await wait_applied(publisher, 0)


async def test_a_learner_in_fp32_sends_actors_in_bf16_theirs(fleet) -> None:
    engine = fleet.add("actor-0")
    engine.weights = {name: tensor.bfloat16() for name, tensor in engine.weights.items()}
    config = msgspec.structs.replace(fleet.config, probe_tolerance=0.1)
    with Publisher(config, 1, 7, fleet.endpoint, None, "bfloat16") as publisher:
        weights = fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        assert all(torch.equal(engine.weights[n], weights[n].bfloat16()) for n in weights)


async def test_an_older_incarnation_is_refused(fleet) -> None:
    fleet.add("actor-0")
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        fleet.subscribers[0].verified = (8, 0)  # what a newer learner had it apply
        fleet.publish(publisher, 1)
        with pytest.raises(VerificationFailed, match=r"\(7, 1\) after \(8, 0\)"):
            await wait_applied(publisher, 1)


async def test_beside_a_default_process_group(fleet) -> None:
    """DeepSpeed's own group lives in the learner's process."""
    own = not torch.distributed.is_initialized()  # an engine of another test may have one already
    if own:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fleet.add("actor-0")
        with fleet.publisher(1) as publisher:
            fleet.publish(publisher, 0)
            await wait_applied(publisher, 0)
        mine = torch.ones(3)
        torch.distributed.all_reduce(mine)
        assert mine.tolist() == [1.0, 1.0, 1.0]
    finally:
        if own:
            torch.distributed.destroy_process_group()


async def test_the_latest_version_wins(fleet) -> None:
    engine = fleet.add("actor-0")
    proceed = asyncio.Event()
    engine.pause = proceed.wait
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 0)
        while "receive" not in engine.calls:
            await asyncio.sleep(0.01)
        for version in range(1, 6):
            fleet.publish(publisher, version)
        proceed.set()
        await wait_applied(publisher, 3)
        await wait_applied(publisher, 5)
        gauges = publisher.gauges()
    assert gauges["sync/updates"] == 2 and gauges["sync/overtaken"] == 4
    assert gauges["sync/published"] == 5


async def test_versions_go_forwards(fleet) -> None:
    with fleet.publisher(1) as publisher:
        fleet.publish(publisher, 3)
        with pytest.raises(ValueError, match="version 3 after 3"):
            fleet.publish(publisher, 3)


async def test_an_actor_that_never_joins_is_named(fleet) -> None:
    fleet.add("actor-0")
    missing = pytest.raises(SyncTimeout, match=r"actor-1 \(1 of 2 joined\)")
    with fleet.publisher(2) as publisher:
        while publisher._joined < 1:
            await asyncio.sleep(0.01)
        with missing:
            await asyncio.to_thread(publisher.wait_for_actors, 0.5)


async def test_over_tcp_the_run_s_keys_let_an_actor_in_and_others_do_not(fleet, tmp_path) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        fleet.endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    fleet.keys = Keys(tmp_path / "keys")
    with fleet.publisher(1) as publisher:
        fleet.add("actor-0")
        await asyncio.to_thread(publisher.wait_for_actors, 20)
        weights = fleet.publish(publisher, 0)
        await wait_applied(publisher, 0)
        assert fleet.subscribers[0].verified == (7, 0) and weights
        fleet.keys = Keys(tmp_path / "others").make()
        fleet.add("actor-1", msgspec.structs.replace(fleet.config, join_deadline_s=0.5))
        with pytest.raises(SyncTimeout, match=r"actor-1: the learner at tcp.* said nothing for"):
            await fleet.tasks[1]
        publisher.check()


async def test_a_silent_learner_is_named(fleet) -> None:
    config = msgspec.structs.replace(fleet.config, join_deadline_s=0.2)
    fleet.add("actor-0", config)
    with pytest.raises(SyncTimeout, match=r"actor-0: the learner at ipc.* said nothing for 0\.2 s"):
        await fleet.tasks[0]


def test_garbage_on_the_socket_is_dropped(endpoint) -> None:
    context = zmq.Context()
    with Publisher(WeightSyncConfig(), 1, 0, endpoint) as publisher:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        dealer.send(b"\xc1 not msgpack")
        with pytest.raises(SyncTimeout):
            publisher.wait_for_actors(0.3)
        publisher.check()
    context.destroy(0)


def test_an_endpoint_that_cannot_be_bound_is_named(tmp_path) -> None:
    with pytest.raises(WeightSyncError, match=r"endpoint 'ipc://.*/absent/x': cannot listen"):
        Publisher(WeightSyncConfig(), 1, 0, f"ipc://{tmp_path}/absent/x")

"""One row of `forage bench weight-sync`: the same bytes to the same receivers, in turn by a real
publisher, by one plain broadcast, by a broadcast for each parameter, and copied once.

The receivers are processes of their own (`peer`). Every wait has a deadline.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from scripts.bench.harness import START_S, Processes, medians
from scripts.bench.weight_sync import peer
from weight_sync.publisher import Publisher


class Row(msgspec.Struct, frozen=True):
    """A load: so many bytes in so many tensors, to so many receivers."""

    nbytes: int
    tensors: int
    receivers: int


def run_row(row: Row, rounds: int, folder: Path) -> dict[str, Any]:
    """Medians over `rounds`, after one that does not count; seconds and GB/s."""
    weights = peer.model(row.tensors, row.nbytes)
    flat = torch.zeros(sum(w.numel() for w in weights.values()))
    source, places = torch.ones_like(flat), [torch.zeros_like(w) for w in weights.values()]
    endpoint, meeting = f"ipc://{folder}/sync", str(folder / "group")
    world = row.receivers + 1
    words = [["forage", f"actor-{i}", endpoint, "cpu"] for i in range(row.receivers)]
    words += [["raw", str(rank), str(world), meeting] for rank in range(1, world)]
    with (
        peers(words, row, folder),
        Publisher(peer.CONFIG, row.receivers, 1, endpoint) as publisher,
        _plain_group(world, meeting),
    ):
        publisher.wait_for_actors(START_S)
        seen = []
        for version in range(rounds + 1):
            for weight in weights.values():
                weight.add_(1.0)
            found = published(publisher, version, weights)
            found["raw_s"] = _sent(peer.FLAT, [flat])
            found["per_parameter_s"] = _sent(peer.EACH, list(weights.values()))
            found["memcpy_s"] = _copied([flat], [source])
            found["copies_s"] = _copied(places, list(weights.values()))
            seen.append(found)
        dist.broadcast(torch.tensor([peer.STOP]), 0)
    return _summary(row, flat.numel() * 4, seen[1:])


def published(
    publisher: Publisher, version: int, weights: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Seconds of one version, from `publish` until it serves everywhere."""
    expected = peer.probe(weights, peer.PROBE)
    begun = time.perf_counter()
    publisher.publish(version, weights.items(), peer.PROBE, expected)
    publisher.wait_applied(version, peer.DEADLINE_S)
    whole_s = time.perf_counter() - begun
    gauges = publisher.gauges()
    names = ("publish_s", "broadcast_s", "receive_s", "apply_s", "generation_pause_s")
    return {"whole_s": whole_s, **{name: gauges[f"sync/{name}"] for name in names}}


def _sent(order: int, tensors: list[torch.Tensor]) -> float:
    dist.broadcast(torch.tensor([order]), 0)
    time.sleep(0.05)  # until every receiver waits for it, as they do for a publisher's bytes
    begun = time.perf_counter()
    for tensor in tensors:
        dist.broadcast(tensor, 0)
    return time.perf_counter() - begun


def _copied(places: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
    begun = time.perf_counter()
    torch._foreach_copy_(places, sources)
    return time.perf_counter() - begun


def _summary(row: Row, nbytes: int, seen: list[dict[str, float]]) -> dict[str, Any]:
    found = medians(seen)
    carried_s = found["publish_s"] + found["broadcast_s"]
    return {
        **msgspec.to_builtins(row),
        **found,
        "transfer_gb_per_s": nbytes / 1e9 / found["broadcast_s"],
        "whole_gb_per_s": nbytes / 1e9 / found["whole_s"],
        "over_raw_broadcast": found["raw_s"] / found["broadcast_s"],
        "over_per_parameter": found["per_parameter_s"] / carried_s,
        "trainer_pause_over_memcpy": found["publish_s"] / found["memcpy_s"],
        "trainer_pause_over_copies": found["publish_s"] / found["copies_s"],
    }


@contextmanager
def peers(words: Sequence[Sequence[str]], row: Row, folder: Path) -> Iterator[None]:
    """Receiving processes of a row's size, told `words` (`scripts.bench.weight_sync.peer`)."""
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    size = (str(row.tensors), str(row.nbytes))
    with Processes(folder) as processes:
        for number, each in enumerate(words):
            module = ("-m", "scripts.bench.weight_sync.peer")
            processes.start(f"peer-{number}", *module, *each, *size, env=env)
        yield


@contextmanager
def _plain_group(world: int, meeting: str) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    peer.join(0, world, meeting)
    try:
        yield
    finally:
        dist.destroy_process_group()

"""The double buffer between two threads: the latest wins, and nothing is torn."""

import threading

import pytest
import torch

from weight_sync import buckets
from weight_sync.protocol import ManifestMismatch
from weight_sync.staging import Parcel, Staging


def put(staging: Staging, version: int) -> None:
    staging.put(version, [("w", torch.full((1000,), float(version)))], (1, 2), (-0.5,))


def values(parcel: Parcel) -> set[float]:
    (_, tensor), *_ = buckets.unpack(parcel.specs, parcel.buckets)
    return set(tensor.tolist())


def test_the_latest_version_wins() -> None:
    staging = Staging(1024)
    for version in range(3):
        put(staging, version)
    parcel = staging.newest()
    assert parcel is not None and parcel.version == 2 and values(parcel) == {2.0}
    assert staging.overtaken == 2 and staging.newest() is parcel


def test_a_parcel_in_hand_is_not_written_to() -> None:
    staging = Staging(1024)
    put(staging, 1)
    parcel = staging.newest()
    assert parcel is not None
    put(staging, 2)
    put(staging, 3)
    assert values(parcel) == {1.0}
    newest = staging.newest()
    assert newest is not None and values(newest) == {3.0}


def test_never_torn_with_two_threads() -> None:
    staging, seen = Staging(1024), []

    def send() -> None:
        while not seen or seen[-1] != 300:
            if (parcel := staging.newest()) is not None:
                assert values(parcel) == {float(parcel.version)}
                seen.append(parcel.version)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    for version in range(301):
        put(staging, version)
    thread.join(20)
    assert not thread.is_alive() and seen == sorted(seen)


def test_another_model_is_refused_and_the_buffer_survives() -> None:
    staging = Staging(1024)
    put(staging, 1)
    with pytest.raises(ManifestMismatch, match="'w'"):
        staging.put(2, [("w", torch.zeros(3))], (1, 2), (-0.5,))
    put(staging, 3)
    assert (parcel := staging.newest()) is not None and parcel.version == 3

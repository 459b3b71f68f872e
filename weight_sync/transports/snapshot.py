"""Transport by files, in a folder that all nodes see; on one machine perhaps /dev/shm.

A version is one file of all buckets in order, which appears whole under its number. A receiver
waits for it until its deadline, rank 0 for nobody. Of each group the last two files are kept, and
all go with the group. What a killed learner leaves in the run's socket directory goes with the run;
in a configured `weight_sync.snapshot_dir` it stays, as `weights-INCARNATION-EPOCH-...`.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Self

import torch

from configs.runtime.files import replacing
from weight_sync.protocol import Rendezvous, TransportFailed

_LOOK_S = 0.002
_KEPT = 2


class SnapshotTransport:
    """One rank; rank 0 writes, the others read."""

    kind = "snapshot"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._folder = Path(rendezvous.prefix)
        self._sent = 0  # broadcasts so far: all ranks count alike

    @classmethod
    def host(
        cls, address: str, world_size: int, incarnation: int, epoch: int, timeout_s: float
    ) -> Self:
        """Make a private folder in the folder `address`."""
        try:
            folder = tempfile.mkdtemp(prefix=f"weights-{incarnation}-{epoch}-", dir=address)
        except OSError as error:
            raise TransportFailed(
                f"weight_sync.snapshot_dir = {address!r}: cannot write there: {error}"
            ) from error
        rendezvous = Rendezvous(
            incarnation=incarnation,
            epoch=epoch,
            transport=cls.kind,
            store_host="",
            store_port=0,
            prefix=folder,
            rank=0,
            world_size=world_size,
            timeout_s=timeout_s,
        )
        return cls(rendezvous)

    @classmethod
    def join(cls, rendezvous: Rendezvous) -> Self:
        """See the learner's folder. Raises TransportFailed when this host does not."""
        return cls(rendezvous).form()

    def form(self) -> Self:
        """See the folder: there is nobody to wait for."""
        if not self._folder.is_dir():
            raise TransportFailed(
                f"{self._folder} is not there: weight_sync.snapshot_dir must be a folder that the "
                "learner's node and the actor's both see"
            )
        return self

    def broadcast(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Write (rank 0) or await and read the buckets. Raises TransportFailed."""
        self._sent += 1
        path = self._folder / str(self._sent)
        try:
            if self.rendezvous.rank == 0:
                self._write(path, buckets)
            else:
                self._read(path, buckets, time.monotonic() + timeout_s)
        except OSError as error:
            raise TransportFailed(f"{path}: {error}") from error

    def place(self) -> str:
        """The device of a receiver's buckets: its host."""
        return "cpu"

    def close(self) -> None:
        """Rank 0 removes the folder."""
        if self.rendezvous.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, path: Path, buckets: Sequence[torch.Tensor]) -> None:
        write_buckets(path, buckets)
        (self._folder / str(self._sent - _KEPT)).unlink(missing_ok=True)

    def _read(self, path: Path, buckets: Sequence[torch.Tensor], deadline: float) -> None:
        while not path.exists():
            if time.monotonic() >= deadline:
                raise TransportFailed(f"rank {self.rendezvous.rank}: {path} did not appear in time")
            time.sleep(_LOOK_S)
        read_buckets(path, buckets)


def write_buckets(path: Path, buckets: Sequence[torch.Tensor]) -> None:
    """Write a file of all buckets in order, which appears whole."""
    with replacing(path, durable=False) as draft, draft.open("wb", buffering=0) as file:
        write_all(file, buckets)


def write_all(file: FileIO, buckets: Sequence[torch.Tensor]) -> None:
    """Write all buckets in order to an open file."""
    for bucket in buckets:
        view = memoryview(bucket.cpu().numpy())
        while len(view):
            view = view[file.write(view) :]


def read_buckets(path: Path, buckets: Sequence[torch.Tensor]) -> None:
    """Fill the buckets, in order, from such a file. Raises OSError where it is too short."""
    with path.open("rb", buffering=0) as file:
        for bucket in buckets:
            view = memoryview(bucket.numpy())
            while len(view):
                if not (count := file.readinto(view)):
                    raise OSError("it is too short")
                view = view[count:]

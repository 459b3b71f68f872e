"""Transport between the actors of one node: the file in which its relay hands a version on.

The relay has the version with the right digest before it writes; the others wait for the file, read
it and compare the digest for themselves. It lies in memory where there is room, else under /tmp, in
a folder of the relay's own inside one of mode 0700. The relay removes it once all have applied the
version, and the folder with its group. The folder is locked while the relay lives, so what a killed
one leaves is known: whoever joins a group next on that node removes it.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import psutil
import torch

from configs.runtime.files import Locked, LockUnsupported, open_locked
from configs.runtime.process import make_private
from weight_sync.protocol import RelayFailed, Rendezvous, TransportFailed
from weight_sync.transports.snapshot import read_buckets, write_buckets

BASES = (Path("/dev/shm"), Path("/tmp"))
_LOOK_S = 0.002
_PATIENCE_S = 5.0  # an engine's first worker makes the folder while the others look for it


class NodeFile:
    """The relay's side: its folder, and in it the version under way."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Make the folder `hand_on` where `nbytes` have room. Raises RelayFailed."""
        self._closed = False
        self._written = 0  # versions so far: relay and readers count alike
        self._folder, self._lock = _made(rendezvous.hand_on, rendezvous.nbytes)

    def write(self, buckets: Sequence[torch.Tensor]) -> None:
        """Hand on a version. Raises RelayFailed."""
        self.clear()
        self._written += 1
        try:
            write_buckets(self._folder / str(self._written), buckets)
        except OSError as error:
            raise RelayFailed(f"the relay cannot hand weights on: {error}") from error

    def clear(self) -> None:
        """Remove the version that was handed on last."""
        (self._folder / str(self._written)).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder; readers that still wait there end. May be called twice."""
        if not self._closed:
            self._closed = True
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)


class NodeTransport:
    """The readers' side."""

    kind = "node"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._folder = Path()
        self._read = 0

    @classmethod
    def join(cls, rendezvous: Rendezvous) -> Self:
        """See the relay's folder. Raises RelayFailed where it is not seen."""
        return cls(rendezvous).form()

    def form(self) -> Self:
        """Find the folder."""
        name, end = _checked(self.rendezvous.prefix), time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            for home in _homes():
                if (home / name).is_dir():
                    self._folder = home / name
                    return self
            time.sleep(_LOOK_S)
        raise RelayFailed(
            f"the relay's folder {name} is in none of {', '.join(map(str, _homes()))}: actors of "
            "one node must see the same files as one user"
        )

    def broadcast(self, buckets: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Await the next version and read it. Raises RelayFailed where it cannot be read, and
        TransportFailed where the relay is late, has left or has died.
        """
        self._read += 1
        path, end = self._folder / str(self._read), time.monotonic() + timeout_s
        while not path.exists():
            if _abandoned(self._folder):
                raise TransportFailed(f"{path}: the relay has left")
            if time.monotonic() >= end:
                raise TransportFailed(f"{path} did not appear within {timeout_s:g} s")
            time.sleep(_LOOK_S)
        try:
            read_buckets(path, buckets)
        except OSError as error:
            raise RelayFailed(f"{path}: {error}") from error

    def place(self) -> str:
        """The device of a receiver's buckets: its host."""
        return "cpu"

    def close(self) -> None:
        """Do nothing: the folder is the relay's."""


def remove_leftovers() -> None:
    """Remove the folders of this user's relays that have died."""
    for home in _homes():
        with contextlib.suppress(OSError):
            if home.stat().st_uid != os.getuid() or home.is_symlink():
                continue
            for folder in home.iterdir():
                _remove_unless_locked(folder)


def _remove_unless_locked(folder: Path) -> None:
    try:
        descriptor = open_locked(folder, "a relay")
    except (Locked, LockUnsupported, FileNotFoundError):
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


def _abandoned(folder: Path) -> bool:
    """True where a relay's folder is gone, or its process."""
    try:
        os.close(open_locked(folder, "a relay"))
    except Locked:
        return False
    except OSError:
        return not folder.is_dir()
    return True


def _homes() -> Iterator[Path]:
    """This user's folders, in memory first."""
    return (base / f"forage-{os.getuid()}-weights" for base in BASES if base.is_dir())


def _made(name: str, nbytes: int) -> tuple[Path, int]:
    """A locked folder of this name where so many bytes have room."""
    causes = []
    for home in _homes():
        try:
            make_private(home)
            if (free := _room(home)) < nbytes:
                causes.append(f"{home}: {free / 1e9:.2g} GB are free")
                continue
            return _locked(home / _checked(name))
        except OSError as error:
            causes.append(f"{home}: {error}")
    raise RelayFailed(
        f"the relay finds no room for {nbytes / 1e9:.2g} GB of weights: {'; '.join(causes)}"
    )


def _locked(folder: Path) -> tuple[Path, int]:
    """Make and lock a folder. Who removes leftovers may take it between the two: made again."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            return folder, open_locked(folder, "a relay")
        except (FileNotFoundError, Locked):
            time.sleep(_LOOK_S)


def _room(home: Path) -> int:
    """Bytes that may be written there; what lies in memory takes memory."""
    free = shutil.disk_usage(home).free
    in_memory = home.parent == BASES[0]
    return min(free, psutil.virtual_memory().available) if in_memory else free


def _checked(name: str) -> str:
    if not name.isalnum():
        raise RelayFailed(f"{name!r} names no folder of a relay")
    return name

"""This host's GPUs, shared out among the processes that use them: a lock on a file for each.

    hold    the GPUs that a plan gives: of a run's learner and its own actors, which may share one
    take    as many as are free, side by side: for whoever is in no plan

A GPU is known by its UUID, so that processes meet whose CUDA_VISIBLE_DEVICES differ. A lock ends
with its process, however that ends. Files lie in a folder of this user's: other users' processes,
and other programs, are unknown here.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from configs.devices import on_cpu
from configs.runtime.files import Locked, lock, locked
from configs.runtime.process import make_private

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
FOLDER = Path("/tmp") / f"forage-{os.getuid()}-gpus"
_HOLDER = "another process of Forage"
_PATIENCE_S = 30.0  # while another one chooses, which takes milliseconds


class GpusTaken(Exception):
    """Not as many GPUs are free, side by side, as were asked for."""


class Gpus:
    """GPUs that this process uses until `release`, as CUDA_VISIBLE_DEVICES names them."""

    def __init__(self, names: Sequence[str] = (), locks: Sequence[int] = ()) -> None:
        self.names = tuple(names)
        self._locks = list(locks)

    @contextlib.contextmanager
    def visible(self) -> Iterator[None]:
        """Have a process that is started inside see these alone; none: what this one sees."""
        before = os.environ.get(VISIBLE)
        if self.names:
            os.environ[VISIBLE] = ",".join(self.names)
        try:
            yield
        finally:
            if before is not None:
                os.environ[VISIBLE] = before
            elif self.names:
                del os.environ[VISIBLE]

    def release(self) -> None:
        """Leave them to others; twice is harmless."""
        while self._locks:
            os.close(self._locks.pop())


def visible() -> dict[str, str]:
    """The GPUs that this process may use, by the names of CUDA_VISIBLE_DEVICES, and their UUIDs."""
    if on_cpu():
        return {}
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count()
    listed = [each.strip() for each in os.environ.get(VISIBLE, "").split(",") if each.strip()]
    names = listed[:count] if listed else [str(number) for number in range(count)]
    uuids: list[str] = []
    with contextlib.suppress(AttributeError, OSError):  # private to torch; a driver without NVML
        uuids = torch.cuda._raw_device_uuid_nvml() or []
    return {name: _uuid(name, uuids) for name in names}


def _uuid(name: str, uuids: Sequence[str]) -> str:
    """The UUID of a GPU given by number or by the first part of its UUID; unknown: the name."""
    if name.isdigit():
        return uuids[int(name)] if int(name) < len(uuids) else name
    return next((each for each in uuids if each.startswith(name)), name)


def hold(names: Sequence[str], gpus: Mapping[str, str], folder: Path = FOLDER) -> Gpus:
    """Use these of the `visible` GPUs, beside others that hold them."""
    locks = []
    with _choosing(folder):
        for name in names:
            try:
                locks.append(_lock(folder, gpus[name], shared=True))
            except Locked:
                log.warning("GPU %s is taken by %s: both use it now", name, _HOLDER)
    return Gpus(names, locks)


def take(count: int, gpus: Mapping[str, str], folder: Path = FOLDER) -> Gpus:
    """Take the first `count` of the `visible` GPUs, side by side, that nobody holds; all of them
    where there are no more, and nothing to choose. Raises GpusTaken.
    """
    names = list(gpus)
    if len(names) <= count:
        return hold(names, gpus, folder)
    with _choosing(folder):
        for first in range(len(names) - count + 1):
            group = names[first : first + count]
            with contextlib.suppress(Locked):
                return Gpus(group, _lock_all(folder, [gpus[name] for name in group]))
    free = "none" if count == 1 else f"no {count} side by side"
    raise GpusTaken(
        f"{free} of the {len(names)} GPUs here can be had: processes of Forage hold them: end one, "
        f"or name those to share: {VISIBLE}={','.join(names[:count])}"
    )


@contextlib.contextmanager
def _choosing(folder: Path) -> Iterator[None]:
    """Keep others from choosing meanwhile."""
    make_private(folder)
    flags = os.O_RDWR | os.O_CREAT
    with locked(folder / "choosing", _HOLDER, flags, patience_s=_PATIENCE_S):
        yield


def _lock_all(folder: Path, uuids: Sequence[str]) -> list[int]:
    with contextlib.ExitStack() as stack:
        locks = []
        for uuid in uuids:
            locks.append(_lock(folder, uuid, shared=False))
            stack.callback(os.close, locks[-1])
        stack.pop_all()
    return locks


def _lock(folder: Path, uuid: str, *, shared: bool) -> int:
    """An open and locked file of the GPU's. Raises Locked."""
    path = folder / uuid.replace("/", "_")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(descriptor, path, _HOLDER, shared=shared)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

"""A node of the cluster: what Ray tells of it, and the facts that are found there.

`look` runs on the node itself. Nothing here waits for anything but the node's own disks, and for a
connection `CONNECT_S`.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from configs.devices import DRIVER
from configs.runtime.process import PACKAGES, REPOSITORY
from scripts.setup.resolve import free_ports

CONNECT_S = 5.0
ANY = 0  # a port of the system's choice, as weights and collectives take
LIBRARIES = ("torch", "vllm", "ray", "transformers")
OURS = "forage"
_LOCK, _HERE = "lock", "launcher"  # files of the folder that nodes meet in


class Node(msgspec.Struct, frozen=True):
    """A machine of the cluster, as Ray tells of it: `address` is its name everywhere."""

    address: str
    name: str  # its host name
    gpus: int
    cpus: float
    taken: int = 0  # of its GPUs, those that others have

    @property
    def shown(self) -> str:
        """Its address, and its host name where that says more."""
        return self.address if self.name in ("", self.address) else f"{self.address} ({self.name})"

    def is_one_of(self, names: Sequence[str]) -> bool:
        """True where a list of addresses and host names has it, or is empty."""
        return not names or self.address in names or self.name in names


class Asked(msgspec.Struct, frozen=True):
    """What is to be found on a node. `meeting`: the launcher's folder on storage that all see."""

    run_dir: str
    paths: tuple[str, ...]
    meeting: str
    ports: int  # how many free ones


class Facts(msgspec.Struct, frozen=True):
    """What was found on a node: versions by package, sizes by path (None: nothing there), free
    bytes, and what is wrong with its folders ('': nothing).
    """

    versions: dict[str, str]
    python_path: str  # by which a process there imports what this one did
    sizes: dict[str, int | None]
    cores: int  # that processes there may use
    memory_bytes: int
    gpu_bytes: tuple[int, ...]
    tmp_bytes: int
    shm_bytes: int
    ports: tuple[int, ...]
    run_dir: str
    shared: str


class Surveyed(msgspec.Struct, frozen=True):
    """A node with its facts. Its clock is `ahead_s` of the launcher's, to within `doubt_s`."""

    node: Node
    facts: Facts
    ahead_s: float = 0.0
    doubt_s: float = 0.0


def look(asked: Asked, address: str) -> Facts:
    """Find the facts of the node that this process runs on, which has `address`."""
    folders = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return Facts(
        versions=versions(),
        python_path=os.pathsep.join(dict.fromkeys(folders)),
        sizes={path: size_of(Path(path)) for path in asked.paths},
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().available,
        gpu_bytes=tuple(_gpu_bytes()),
        tmp_bytes=shutil.disk_usage("/tmp").free,
        shm_bytes=_free("/dev/shm"),
        ports=tuple(free_ports(address, asked.ports)),
        run_dir=_unmakeable(Path(asked.run_dir)),
        shared=_not_shared(Path(asked.meeting), address) if asked.meeting else "",
    )


def versions() -> dict[str, str]:
    """Of what must be alike on all nodes; '' where it is not installed."""
    found = {"Python": platform.python_version()}
    for name in LIBRARIES:
        found[name] = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {OURS: f"{importlib.metadata.version(OURS)} ({_digest()})"}


def _digest() -> str:
    """Of the source of our packages."""
    digest = hashlib.blake2b(digest_size=5)
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def size_of(path: Path) -> int | None:
    """The bytes of a file, of what a pattern names, or of a folder's own files; None: nothing is
    there.
    """
    if "*" in path.name:
        found = list(path.parent.glob(path.name))
    else:
        found = [*path.iterdir()] if path.is_dir() else [path] if path.exists() else []
        if path.is_dir() and not found:
            return 0
    return sum(each.stat().st_size for each in found if each.is_file()) if found else None


def _free(path: str) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).free
    return 0


def _gpu_bytes() -> Iterator[int]:
    """Yield the memory of each GPU, as NVIDIA's driver tells: Ray hides GPUs from who asks for
    none.
    """
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL(DRIVER)
        count, device = ctypes.c_uint(), ctypes.c_void_p()
        told = (ctypes.c_ulonglong * 3)()  # total, free, used
        if driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for index in range(count.value):
            if not driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                driver.nvmlDeviceGetMemoryInfo(device, told)
                yield int(told[0])


def _unmakeable(folder: Path) -> str:
    """Why a run's folder, or something in it, cannot be made here; ''."""
    above = next(each for each in (folder, *folder.parents) if each.exists())
    probe = above / f".forage-{os.getpid()}-{socket.gethostname()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"{above} cannot be written ({error.strerror})"
    return ""


# ---- storage that all nodes see


@contextlib.contextmanager
def meeting_in(shared: Path) -> Iterator[Path]:
    """Make a folder there for nodes to meet in, with a file of ours and a lock that we hold.
    Raises OSError.
    """
    folder = shared / f".forage-{os.getpid()}-{time.time_ns()}"
    folder.mkdir()
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / _HERE).write_text(folder.name)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def came(meeting: Path, address: str) -> bool:
    """True where the launcher sees what a node wrote into the folder."""
    with contextlib.suppress(OSError):
        return (meeting / address).read_text() == meeting.name
    return False


def _not_shared(meeting: Path, address: str) -> str:
    """Why the folder here is not the launcher's, or does not do what its files need; ''."""
    try:
        if (meeting / _HERE).read_text() != meeting.name:
            return "another folder is there"
        draft = meeting / f".{address}"
        with draft.open("w") as file:
            file.write(meeting.name)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(meeting / address)
        return _unlocked(meeting / _LOCK)
    except FileNotFoundError:
        return "what the launcher wrote there is not there"
    except OSError as error:
        return f"it cannot be used ({error.strerror})"


def _unlocked(path: Path) -> str:
    """Why a lock that the launcher holds does not hold here; ''."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return ""
        return f"it has no locks ({error.strerror})"
    finally:
        os.close(descriptor)
    return "a lock that the launcher holds does not hold there: mount it with locks"


# ---- connections between nodes


class Listeners:
    """Ports that are open until `close`, for others to try."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def open(self, address: str, ports: Sequence[int]) -> list[int]:
        """Listen there; the ports. Raises OSError."""
        opened = [socket.create_server((address, port)) for port in ports]
        self._sockets += opened
        return [each.getsockname()[1] for each in opened]

    def close(self) -> None:
        """Close them all."""
        while self._sockets:
            self._sockets.pop().close()


def unreachable(places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Why a connection from here to each of these failed, of those to which it did."""
    found = {}
    for place in places:
        try:
            socket.create_connection(place, CONNECT_S).close()
        except OSError as error:
            found[place] = error.strerror or str(error)
    return found

"""Processes of ours: how one begins and ends, the children it starts, the folder of its sockets."""

import asyncio
import contextlib
import ctypes
import enum
import errno
import hashlib
import importlib
import importlib.util
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from configs.runtime.amx import use_amx_where_it_works

PACKAGES = (
    "configs", "replay", "weight_sync", "retrieval_server", "actors", "learner", "scripts",
)  # fmt: skip
REPOSITORY = Path(__file__).resolve().parents[2]
PID_FILE = "launcher.pid"  # in a run's socket directory: whose it is
MOST_DESCRIPTORS = 1 << 20  # beyond, or without a limit, what goes over all of them takes for ever
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_kept: ctypes.CDLL | None = None  # the C library, once it keeps freed blocks
_ARGUMENTS = slice(45, 47)  # where they lie in memory: fields of /proc/PID/stat behind the name


class Exit(enum.IntEnum):
    """The end of a process of ours, as its exit code."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2  # it would refuse the same input again
    # A command: early, by rule.
    STOPPED = 3
    # A worker: another one has gone or fallen silent, and the cause is looked for there.
    CONSEQUENCE = 3
    # A worker: started again, it would end the same way, whatever it did before.
    FINAL = 4
    # A learner: its step is saved, and it goes on elsewhere.
    MADE_WAY = 5
    INTERRUPTED = 130


# ---- this process


def begin(name: str, threads: int | None = None) -> None:
    """Prepare this process: its packages, logging, thread count, and death with its parent.

    The process dies with a parent that has put its pid into `FORAGE_PARENT`. A shell puts none, so
    only SIGHUP, from a closed terminal, ends what a shell started, unless `nohup` did.
    Call before torch, vLLM or transformers are imported. Raises RuntimeError when another
    distribution shadows one of our packages.
    """
    assert_packages()
    if "FORAGE_PARENT" in os.environ:
        die_with_parent()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s.%(msecs)03d {name} %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    use_amx_where_it_works()
    raise_descriptors()
    if threads is not None:
        limit_threads(threads)


def raise_descriptors() -> None:
    """Let this process, and those it starts, open as many files and sockets as they may at all, up
    to `MOST_DESCRIPTORS`.
    """
    most = most_descriptors()
    if descriptors() < most:
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def descriptors() -> int:
    """How many files and sockets this process may have open, up to `MOST_DESCRIPTORS`."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def most_descriptors() -> int:
    """How many it may have open once it has raised its limit."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _bounded(limit: int) -> int:
    return MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, MOST_DESCRIPTORS)


def limit_threads(threads: int) -> None:
    """Set how many threads numerical libraries use; call before they are imported."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # They would wait for each other by spinning: twenty times slower where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    use_amx_where_it_works()


def keep_freed_blocks() -> None:
    """Have the C library keep freed blocks of up to 32 MiB at hand until `return_freed_blocks`
    (glibc only).

    On its own it gives many of them back to the kernel at once, and each new one costs page faults:
    two fifths of the passes in bf16 on the CPU.
    """
    global _kept
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        _kept = library


def keep_no_freed_blocks() -> None:
    """Have the C library take blocks of 128 KiB and more from the kernel one by one, and return
    them one by one (glibc only); `return_freed_blocks` then returns the gaps between small ones.

    On its own it soon takes them from its heaps, which they leave in pieces: for weeks a process
    that now and then needs a megabyte would grow.
    """
    global _kept
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
        _kept = library


def return_freed_blocks() -> None:
    """Give every page that holds nothing back to the kernel, also between blocks in use, where one
    of the two above was said: tensors of changing sizes leave gaps, up to half of what is held.
    """
    if _kept:
        _kept.malloc_trim(0)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes event loops: uvloop where it is installed, else None."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    return importlib.import_module("uvloop").new_event_loop  # type: ignore[no-any-return]


def announce_ready() -> None:
    """Make the file that `FORAGE_READY` names, if any: the starter's sign that work begins."""
    if path := os.environ.get("FORAGE_READY"):
        Path(path).touch()


def announce_waiting() -> None:
    """Make the file beside it: the start is done as far as it is this process's, and it waits for
    others' work.
    """
    if path := os.environ.get("FORAGE_READY"):
        waiting_beside(path).touch()


def waiting_beside(ready: str) -> Path:
    """Return the file of `announce_waiting`, beside that of `announce_ready`."""
    return Path(f"{ready}.waiting")


def assert_packages() -> None:
    """Raise RuntimeError unless all seven packages resolve inside this repository."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or not found.is_relative_to(REPOSITORY):
            raise RuntimeError(
                f"package {package!r} resolves to {str(found)!r}, not inside {str(REPOSITORY)!r}: "
                "another distribution shadows it; remove that one or run `pip install -e . "
                "--no-deps`"
            )


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signal_number` when the thread that started this process ends (Linux
    only).

    A starter that puts its pid into `FORAGE_PARENT` is also covered if it died before this call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number))
    expected = os.environ.pop("FORAGE_PARENT", "")
    if expected and os.getppid() != int(expected):
        os.kill(os.getpid(), signal_number)


def outlive_parent() -> None:
    """No longer end with the thread that started this process, as `die_with_parent` asked (Linux
    only).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0)


def set_title(title: str) -> None:
    """Show `title` as this process's command line and, cut to 15 bytes, as its name: for a fork,
    which shows its parent's (Linux only). It overwrites the arguments alone; the environment stays.
    """
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    begin, end = (int(each) for each in fields[_ARGUMENTS])
    if begin:  # else the kernel does not tell
        shown = title.encode()[: end - begin - 1]
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)
    Path("/proc/self/comm").write_text(title)


def leave(code: int) -> NoReturn:
    """End this process at once, once it has closed what it opened: with vLLM or torch loaded, the
    interpreter's own end takes seconds, which a restart or the end of a run would have to wait for.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- its children


def start_child(
    command: Sequence[str],
    *,
    log: Path | None = None,
    ready: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    own_group: bool = False,
    own_session: bool = False,
    outlives_us: bool = False,
    passed_files: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start `python COMMAND`, which ends with the thread that calls if it calls `begin`.

    Its output goes to the end of `log`, else to ours; it makes the file `ready` once its work
    begins. In a group or session of its own it does not get a terminal's Ctrl-C. `outlives_us`: it
    does not end with this process.
    """
    told = {} if outlives_us else {"FORAGE_PARENT": str(os.getpid())}
    if ready is not None:
        told["FORAGE_READY"] = str(ready)
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("ab", buffering=0))
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=stdin,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {}), **told},
            start_new_session=own_session,
            process_group=0 if own_group else None,
            pass_fds=passed_files,
        )


def end_child(process: "subprocess.Popen[bytes]", patience_s: float) -> None:
    """Wait for a process's end; kill it when that takes longer."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- its sockets


def socket_dir(run_dir: str) -> Path:
    """The run's own 0700 directory under /tmp for ipc sockets, whose paths end at 107 bytes; the
    one that `FORAGE_SOCKETS` names, if any: each node of a cluster has its own.
    """
    if named := os.environ.get("FORAGE_SOCKETS"):
        return Path(named)
    digest = hashlib.blake2b(str(Path(run_dir).resolve()).encode(), digest_size=5).hexdigest()
    return Path("/tmp") / f"forage-{os.getuid()}-{digest}"


def make_socket_dir(run_dir: str) -> Path:
    """Create `socket_dir(run_dir)`, mode 0700. Raises PermissionError when it is another user's."""
    path = socket_dir(run_dir)
    make_private(path)
    return path


def make_private(path: Path) -> None:
    """Create a folder where all may write, mode 0700. Raises PermissionError when it is another
    user's.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid() or path.is_symlink():
        raise PermissionError(errno.EPERM, "it belongs to another user: remove it", str(path))
    path.chmod(0o700)

"""A check of this machine: what a run needs, what is there, and a remedy for each shortcoming.

Every check is a function that returns one `Finding`. Libraries may end the process that loads them,
and are tried in processes of their own: their compiled parts, as a whole import takes seconds.
"""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.devices import on_cpu
from configs.load import ConfigError, load
from configs.runtime.files import weights_bytes
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts.command.terminal import status
from scripts.setup import machine, preflight
from scripts.setup.fit import fitted
from scripts.setup.gpu_memory import GIB
from scripts.setup.resolve import resolve

PYTHONS = (3, 11), (3, 15)  # from, and before
LEAST_CORES = 2
RUNS = "runs"  # where run_dir is by default
DRIVER = 580  # the first of CUDA 13
DEMO = REPOSITORY / "configs" / "demo.yaml"
LEAST_DISK_BYTES, LEAST_SHARED_BYTES = 2 * GIB, GIB // 4
LEAST_FILES = 4096  # open at once: Ray's and vLLM's sockets
LOAD_S = 180.0
LIBRARIES = {
    "vllm": "actors generate with it",
    "ray": "places processes",
    "faiss": "dense search",
    "deepspeed": "the learner's engine",
}
# As vLLM chooses its kernels (vllm/platforms/cpu.py): on x86 there are some for each kind of CPU.
_KERNELS = """
import torch
kinds = {file.name.split(".")[0]: file for file in folder.glob("_C*.so")}
kind = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
kind = kind if torch.cpu._is_avx512_supported() else "_C_AVX2"
torch.ops.load_library(kinds.get(kind, kinds["_C"]))
"""
PARTS = {  # to load, of what takes seconds to import: vLLM's kernels; DeepSpeed is plain Python
    "vllm": _KERNELS,
    "deepspeed": "",
}
COMPILERS = ("cc", "gcc", "clang")
INSTALL = "run `make .venv` (with GPU=1 on a machine with GPUs)"


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at. A shortcoming that is not `required` does not hinder a run."""

    what: str
    has: str
    needs: str
    ok: bool
    remedy: str = ""
    required: bool = True

    @property
    def problems(self) -> int:
        """The number of lines in the remedy where a run cannot start; else 0."""
        return len(self.remedy.splitlines()) if self.required and not self.ok else 0


def of_this_machine(path: str | None, overrides: Sequence[str]) -> list[Finding]:
    """What was found here; with a configuration, also for that one. Raises ConfigError."""
    config = fitted(load(path, overrides)) if path else None
    with status("looking at this machine, loading its libraries"):
        found = list(findings(config))
    if config is not None and path:
        run = resolve(config, Path(path).stem)
        found.append(configuration(lambda: preflight.check(run)))
    return found


def findings(config: Config | None = None, runs: str = RUNS) -> Iterator[Finding]:
    """Everything about the machine; with a configuration, what that one needs of it. `runs`: where
    runs lie without one.
    """
    run_dir = Path(config.run_dir if config and config.run_dir else runs).resolve()
    weights = weights_bytes(config.model.path) if config else 0
    kept = config.learner.keep_checkpoints + 1 if config else 0
    kept += 2 if config and config.sentinels.roll_back else 0  # to go back to
    lock = REPOSITORY / "requirements" / ("cpu.lock" if on_cpu() else "gpu.lock")
    yield python(sys.version_info[:2])
    yield packages(lock)
    yield cores(len(os.sched_getaffinity(0)))
    demo = sum(machine.memory_needed(load(DEMO)).values())  # measured: README has it
    needed = machine.least_memory(machine.memory_needed(config)) if config else demo
    yield memory(psutil.virtual_memory().available, needed)
    yield gpus()
    # A checkpoint holds the weights, two averages and Adam's two moments in 32 bits.
    yield disk("disk, runs", run_dir, LEAST_DISK_BYTES + 6 * kept * weights)
    yield disk("disk, /tmp", Path("/tmp"), GIB)
    yield disk("shared memory", Path("/dev/shm"), LEAST_SHARED_BYTES + weights)
    for folder in (_existing(run_dir), Path("/tmp"), Path("~/.cache").expanduser()):
        yield writable(folder)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield listening("TCP, 127.0.0.1", _tcp)
    yield listening("Unix sockets", _unix)
    yield compiler(next(filter(None, map(shutil.which, COMPILERS)), None), needed=not on_cpu())
    with ThreadPoolExecutor() as pool:
        yield from pool.map(library, LIBRARIES)


def python(version: tuple[int, int]) -> Finding:
    """The interpreter's version."""
    first, before = (".".join(map(str, each)) for each in PYTHONS)
    ok = PYTHONS[0] <= version < PYTHONS[1]
    remedy = f"install Python {first} or later and run `make PYTHON=python3.12 .venv`"
    return Finding("Python", ".".join(map(str, version)), f">= {first}, < {before}", ok, remedy)


def packages(lock: Path, version_of: Callable[[str], str] = metadata.version) -> Finding:
    """The installed packages against the lock; another version than the locked one may do."""
    missing, different = [], []
    lines = [line.partition(" --hash=")[0] for line in lock.read_text().splitlines()]
    wanted = [line.partition("#")[0].strip() for line in lines]
    asked = [Requirement(line) for line in wanted if line and not line.startswith("-")]
    for requirement in asked:
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            found = version_of(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(found.partition("+")[0], prereleases=True):
            different.append(f"{requirement.name} {found}")
    has = f"{len(missing)} missing, {len(different)} other" if missing or different else "all"
    names = ", ".join([*missing, *different][:5])
    return Finding(
        what="packages",
        has=has,
        needs=f"{len(asked)} of {lock.name}",
        ok=not (missing or different),
        remedy=f"{INSTALL}: {names}",
        required=bool(missing),
    )


def cores(count: int) -> Finding:
    """The cores that this process may use."""
    remedy = "give this machine or container more cores: processes will wait for each other"
    needs = f">= {LEAST_CORES}"
    return Finding("cores", str(count), needs, count >= LEAST_CORES, remedy, required=False)


def memory(free: int, needed: int) -> Finding:
    """The memory that is free, against what the configuration or the demo takes."""
    remedy = "end other programs, or lower actors.count, actors.kv_cache_bytes or learner.ranks"
    return Finding("memory", f"{_gib(free)} free", _gib(needed), free >= needed, remedy)


def gpus() -> Finding:
    """The GPUs that NVIDIA's driver shows, and whether the installation is for them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        found = said.stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        found = []
    return judge_gpus(found, for_cpu=on_cpu())


def judge_gpus(found: Sequence[str], for_cpu: bool) -> Finding:
    """`found` has a line `name, driver` for each GPU."""
    name, _, driver = found[0].partition(", ") if found else ("none", "", "")
    has = f"{len(found)} x {name}, driver {driver}" if found else "none"
    if for_cpu:
        remedy = "this one is for the CPU: `make GPU=1 .venv` makes .venv-gpu, to use them"
        return Finding("GPUs", has, "none", not found, remedy, required=False)
    remedy = f"install NVIDIA's driver {DRIVER} or newer, or install for the CPU: `make .venv`"
    fits = bool(found) and int(driver.partition(".")[0] or 0) >= DRIVER
    return Finding("GPUs", has, f">= 1, driver {DRIVER}", fits, remedy)


def disk(what: str, folder: Path, needed: int) -> Finding:
    """The room that is left on a folder's file system."""
    free = shutil.disk_usage(_existing(folder)).free
    remedy = f"make room on the file system of {folder}, or put run_dir on another one"
    return Finding(what, f"{_gib(free)} free", _gib(needed), free >= needed, remedy)


def writable(folder: Path) -> Finding:
    """The right to make files in a folder, made where it is missing."""
    shown = str(folder).replace(str(Path.home()), "~")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding(f"write {shown}", "yes", "yes", True)
    except OSError as error:
        remedy = f"give yourself the right to write in {folder} ({error.strerror})"
        return Finding(f"write {shown}", "no", "yes", False, remedy)


def open_files(soft: int, hard: int) -> Finding:
    """The limit of open files (`ulimit -n`); what is started may raise the soft one to the hard."""
    unlimited = resource.RLIM_INFINITY
    enough = soft == unlimited or soft >= LEAST_FILES
    reachable = enough or hard == unlimited or hard >= LEAST_FILES
    has = "unlimited" if soft == unlimited else str(soft)
    remedy = f"run `ulimit -n {LEAST_FILES}` in this shell first"
    return Finding("open files", has, f">= {LEAST_FILES}", enough, remedy, required=not reachable)


def listening(what: str, listen: Callable[[], None]) -> Finding:
    """A server and a client of this machine find each other."""
    try:
        listen()
    except OSError as error:
        remedy = f"let programs listen and connect there ({error.strerror or error})"
        return Finding(what, "no", "to connect", False, remedy)
    return Finding(what, "connects", "to connect", True)


def compiler(found: str | None, needed: bool) -> Finding:
    """A C compiler, for the kernels that GPU libraries build when they start."""
    remedy, ok = "install one, for example `apt install build-essential`", bool(found) or not needed
    return Finding("C compiler", found or "none", "one" if needed else "none", ok, remedy)


def library(name: str, deadline_s: float = LOAD_S) -> Finding:
    """The load of a library's compiled part in a process of its own."""
    version, needs = _version(name), LIBRARIES.get(name, "to load")
    if not version:
        return Finding(name, "missing", needs, False, INSTALL)
    find = "import importlib.util, pathlib"
    folder = f"folder = pathlib.Path(importlib.util.find_spec({name!r}).origin).parent"
    code = "\n".join((find, folder, PARTS.get(name, f"import {name}")))
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = said[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"takes more than {deadline_s:g} s"
    return Finding(name, "does not load" if why else version, needs, not why, f"{INSTALL}: {why}")


def _version(name: str) -> str:
    """The version of a distribution, or of its build for CPUs; '' where there is neither."""
    for each in (name, f"{name}-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(each)
    return ""


def configuration(check: Callable[[], object]) -> Finding:
    """What `check` raises: it makes the checks of a run before its start."""
    said = ""
    try:
        check()
    except ConfigError as error:
        said = str(error)
    return Finding("configuration", _problems(len(said.splitlines())), "no problem", not said, said)


def show(found: Sequence[Finding], console: Console) -> None:
    """A table of all, then the remedies, and whether a run can start."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "what", "has", "needs"):
        table.add_column(column, overflow="fold")
    for each in found:
        table.add_row(_mark(each), each.what, each.has, each.needs)
    console.print(table)
    for each in found:
        for line in () if each.ok else each.remedy.splitlines():
            text = f"\n{_mark(each)} [bold]{each.what}[/]: {escape(line)}"
            console.print(text, highlight=False)
    count = sum(each.problems for each in found)
    verdict = f"{_problems(count)}: a run cannot start" if count else "a run can start"
    console.print(f"\n{verdict} here", style="bold red" if count else "bold green")


def _problems(count: int) -> str:
    return f"{count or 'no'} problem{'s' * (count > 1)}"


def _mark(finding: Finding) -> str:
    if finding.ok:
        return "[green]ok[/]"
    return "[red]no[/]" if finding.required else "[yellow]--[/]"


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.is_dir())


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def _unix() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="forage-") as folder,
        socket.socket(socket.AF_UNIX) as server,
        socket.socket(socket.AF_UNIX) as client,
    ):
        server.bind(f"{folder}/socket")
        server.listen()
        client.connect(f"{folder}/socket")

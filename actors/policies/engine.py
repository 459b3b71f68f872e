"""Environment variables, sockets and arguments of the vLLM engine. Imports nothing heavy: variables
are set before vLLM or torch are imported, and a machine without a usable vLLM gets the remedy
named.
"""

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import psutil

from actors.errors import EngineUnusable
from actors.prompt import single_token_ids
from configs.devices import on_cpu
from configs.runtime.amx import use_amx_where_it_works
from configs.runtime.gpus import Gpus, GpusTaken, hold, take, visible
from configs.runtime.process import die_with_parent, set_title, socket_dir
from configs.schema import Config

NICENESS = 5  # more than before
_LOWEST = 19
_TITLE = "VLLM::EngineCore"  # as vLLM titles a spawned engine
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
# Of one batch; left out, vLLM takes 2,048 of an engine that is no server, on an H100 too.
_BATCHED_TOKENS = 8192
# Of the cache's blocks, free when a request is begun: what runs grows into them, where otherwise
# the youngest would be preempted as soon as the cache is full. Throughput is the same.
FREE_BLOCKS = 0.03
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_FREE = 0.05  # of a GPU, when an engine starts; what must fit is checked before


def check_installation() -> None:
    """Raise EngineUnusable, naming the remedy, without vLLM or with a broken torchvision."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineUnusable(
            "vLLM is not installed: run `make .venv` (or install requirements/cpu.lock)"
        )
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        raise EngineUnusable(
            f"torchvision is installed but broken ({error}), and vLLM would fail on it: "
            "run `pip uninstall -y torchvision torchaudio torchcodec`"
        ) from error


def prepare_environment(config: Config) -> None:
    """Set vLLM's environment variables; a value that is already set wins."""
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        _START_METHOD: "spawn",
        "OMP_NUM_THREADS": str(config.actors.threads),
        "NUMBA_NUM_THREADS": "1",  # drafts by n-grams use one, and the others would spin
    }
    if on_cpu():
        settings |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's child works itself
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines share the cores
            "TORCHDYNAMO_DISABLE": "1",  # compiling costs the first requests many seconds
        }
    if config.engine_dtype == "float32":
        settings["TRITON_F32_DEFAULT"] = "ieee"  # its products are in tf32 otherwise
    use_amx_where_it_works()
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def gpus_of_actor(index: int, ranks: int, gpus: int, workers: int = 1) -> range:
    """Return the GPUs of a run's own actor on the learner's host, one for each of its `workers`:
    the learner's ranks take the first, the actors the others in turn, side by side; where the ranks
    leave too few for one actor, all of them. Fewer where there are fewer.
    """
    first = ranks if gpus - ranks >= workers else 0
    groups = max((gpus - first) // workers, 1)
    begin = first + index % groups * workers
    return range(begin, min(begin + workers, gpus))


def too_few_for_workers(config: Config, gpus: int) -> str:
    """Say that so many GPUs, if there are any, are fewer than an engine's workers."""
    workers = config.actors.tensor_parallel
    if not 0 < gpus < workers:
        return ""
    visible = "1 GPU is" if gpus == 1 else f"{gpus} GPUs are"
    return (
        f"actors.tensor_parallel = {workers!r}: {visible} visible here, and each worker needs one: "
        f"lower it to at most {gpus}, or see CUDA_VISIBLE_DEVICES"
    )


def choose_gpus(config: Config, number: int | None = None) -> Gpus:
    """Choose the GPUs of an engine: those of the plan for the run's own actor of that number on the
    learner's host, else what is free on this one. Raises EngineUnusable.
    """
    gpus, workers = visible(), config.actors.tensor_parallel
    names = list(gpus)
    if few := too_few_for_workers(config, len(names)):
        raise EngineUnusable(few)
    try:
        if number is None or len(names) <= workers:
            return take(workers, gpus)
        own = gpus_of_actor(number, config.learner.ranks, len(names), workers)
        return hold([names[index] for index in own], gpus)
    except GpusTaken as error:
        raise EngineUnusable(str(error)) from error


def lower_priority() -> None:
    """On a CPU, lower the priority of this actor and its engine below that of what was started
    beside them. The learner and starting processes are waited for; an actor works without a break
    and would take all the time it can get.
    """
    if not on_cpu():
        return
    process = psutil.Process()
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            for thread in each.threads():
                before = os.getpriority(os.PRIO_PROCESS, thread.id)
                os.setpriority(os.PRIO_PROCESS, thread.id, min(before + NICENESS, _LOWEST))


class _Parent:
    """This process, to the engine that is forked from it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def begin(self) -> None:
        """Prepare the child: it ends with its parent, whose event loop its signals do not wake; its
        own workers are spawned; its title is its own. (vLLM's own call finds the place of a title
        by the first environment variable, and only while nobody has set that anew.)
        """
        os.environ |= {"FORAGE_PARENT": str(self._pid), _START_METHOD: "spawn"}
        die_with_parent()
        signal.set_wakeup_fd(-1)
        set_title(_TITLE)


@contextlib.contextmanager
def forking(threads: int) -> Iterator[None]:
    """Have an engine of so many threads that is started inside be a fork of this process where that
    is safe: on a CPU, with one (OpenMP's teams do not outlive a fork), and without a thread here
    but the one that calls. A spawned child imports vLLM once more, and that is most of its start.
    Enter it with the engine's configuration made: making one asks for "spawn".
    """
    if not on_cpu() or threads > 1 or psutil.Process().num_threads() > 1:
        yield
        return
    parent, before = _Parent(), os.environ.get(_START_METHOD)
    register_after_fork(parent, _Parent.begin)  # for as long as `parent` lives
    os.environ[_START_METHOD] = "fork"
    try:
        yield
    finally:
        os.environ.pop(_START_METHOD)
        if before is not None:
            os.environ[_START_METHOD] = before


class Scratch:
    """A directory for the sockets and rendezvous files that vLLM makes and leaves; inside the run's
    own where there is one, so that they go when this process is killed too. The shared memory of an
    engine's workers, which they leave too, goes with `remove` alone.
    """

    def __init__(self, run_dir: str) -> None:
        place = socket_dir(run_dir)
        parent = place if run_dir and place.is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="engine-", dir=parent)
        self._shared_memory: set[Path] = set()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have an engine that is started inside put its files there."""
        names = ("TMPDIR", "VLLM_RPC_BASE_PATH")
        before = {name: os.environ.get(name) for name in names}
        others = _shared_memory()
        os.environ.update(dict.fromkeys(names, self._folder.name))
        try:
            yield
        finally:
            self._shared_memory = _shared_memory() - others
            for group in Path(self._folder.name).glob("vllm_dist_*"):
                self._shared_memory.update(_SHARED_MEMORY.glob(f"{group.name}-*"))
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def remove(self) -> None:
        """Remove it with its files, once the engine has ended; twice is harmless."""
        with contextlib.suppress(FileNotFoundError):
            self._folder.cleanup()
        for path in filter(Path.exists, self._shared_memory):
            path.unlink()
            if path.name.startswith("psm_"):  # else it would be told of at this process's end
                resource_tracker.unregister(f"/{path.name}", "shared_memory")


def _shared_memory() -> set[Path]:
    """The files of Python's shared memory that processes below this one have mapped."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
            found |= {line.rpartition("/")[2] for line in lines if f"{_SHARED_MEMORY}/psm_" in line}
    return {_SHARED_MEMORY / name for name in found}


def engine_arguments(config: Config, worker_extension: str) -> dict[str, Any]:
    """Return the arguments of AsyncEngineArgs."""
    model, actors = config.model, config.actors
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": config.engine_dtype,
        "max_model_len": model.max_model_len,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": {"head_dtype": model.head_dtype or "model"},
        "tensor_parallel_size": actors.tensor_parallel,
        "max_num_seqs": actors.max_num_seqs,
        "enforce_eager": actors.enforce_eager or on_cpu(),  # where there is nothing to capture
        "max_num_batched_tokens": _BATCHED_TOKENS,
        "enable_prefix_caching": actors.prefix_caching,
        "scheduling_policy": "priority",
        "watermark": FREE_BLOCKS,
        "logprobs_mode": "processed_logprobs",  # after temperature, or ratios are wrong at T ≠ 1
        "disable_log_stats": True,  # by vLLM's own loggers; EngineStatistics gets them
        "worker_extension_cls": worker_extension,
        "use_tqdm_on_load": False,
        # On GPUs too: left to measure, an engine takes for its own what others take meanwhile.
        "kv_cache_memory_bytes": actors.kv_cache_bytes // actors.tensor_parallel,
    }
    if on_cpu():
        # A prefill cut in two makes vLLM rewind the request's generator, which kills the engine:
        # a CPU generator has no offset. So prefills are whole, and every prompt fits one batch.
        arguments |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_BATCHED_TOKENS, model.max_model_len),
        }
    else:
        arguments["gpu_memory_utilization"] = _LEAST_FREE
    return arguments | copy.deepcopy(actors.engine)  # vLLM writes into what it is given


def stop_arguments(tokenizer: Any, stops: Sequence[str]) -> dict[str, Any]:
    """Return sampling arguments that stop at these texts and keep them.

    Tags that are single tokens, added to the vocabulary, stop by id, without detokenising; others
    by string, found in the text while the ids remain as sampled: a word may stand in other tokens
    than its own. The end token stops either way.
    """
    ids = single_token_ids(tokenizer, stops)
    if ids is not None and set(stops) <= tokenizer.get_added_vocab().keys():
        return {"stop_token_ids": ids, "detokenize": False}
    return {"stop": list(stops), "include_stop_str_in_output": True, "skip_special_tokens": False}

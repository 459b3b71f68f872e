"""The needs of a run of this machine: its memory, its GPUs, the transport between them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from actors.policies.engine import gpus_of_actor, too_few_for_workers
from configs.devices import on_cpu
from configs.schema import Config
from scripts.setup import gpu_memory
from scripts.setup.model_size import (
    Model,
    known_model,
    read_model,
    sent_elements,
    trained_elements,
    width_of,
)
from weight_sync.protocol import TransportUnusable
from weight_sync.transports.selection import CPU, choose

# Imports, buffers and stacks of one process, so that the demo asks for its measured peak: its
# processes' RSS comes to 5.3 GiB, which counts shared pages again (PSS: 3.9 GiB).
PROCESS_BYTES = 440 << 20
LESS = (
    "lower actors.kv_cache_bytes, learner.micro_batch_tokens or actors.count, set "
    "learner.gradient_checkpointing, learner.offload=cpu or learner.zero_stage=3, raise "
    "actors.tensor_parallel where an engine alone is too large, or name a smaller model.path"
)
_LESS_OF_AN_ENGINE = (
    "lower actors.kv_cache_bytes or model.max_model_len, raise actors.tensor_parallel, or name a "
    "smaller model"
)
_FILLING = ("actors.kv_cache_bytes", "learner.micro_batch_tokens")
_SIZES = (*_FILLING, "learner.logprob_chunk_bytes")


def lacks(config: Config) -> Iterator[str]:
    """Yield what this machine lacks for the run."""
    if without := missing_gpus(config) or too_few_gpus(config):
        yield without  # memory would be told of a machine that it is not meant for
        return
    yield from _memory(config)
    yield from _batches(config)
    yield from _gpu_memory(config)
    try:
        transport(config)
    except TransportUnusable as error:
        yield str(error)


def record_bytes(config: Config) -> int:
    """About how many bytes the longest rollout's record takes: each token an action, with its
    log-prob and version.
    """
    turns = config.actors.max_turns + 1
    return 12 * config.model.max_model_len + turns * (512 + 64 * config.retrieval.top_k)


def batch_bytes(config: Config) -> int:
    """About how many bytes a batch of the longest rollouts takes."""
    return config.replay.groups_per_step * config.replay.group_size * record_bytes(config)


def _batches(config: Config) -> Iterator[str]:
    """Yield that the batches which replay may hold at once take more memory than is left."""
    batches, has = config.replay.max_staleness + 1, psutil.virtual_memory().available
    if (needed := batches * batch_bytes(config)) > has:
        r = config.replay
        yield (
            f"replay.groups_per_step = {r.groups_per_step!r}, replay.group_size = "
            f"{r.group_size!r}: {batches} batches (replay.max_staleness = {r.max_staleness!r}) of "
            f"rollouts of model.max_model_len = {config.model.max_model_len!r} tokens take up to "
            f"{needed / (1 << 30):.1f} GiB, and {has / (1 << 30):.1f} are left here: lower one "
            "of them"
        )


def lacks_for_an_engine(config: Config) -> Iterator[str]:
    """Yield what this machine lacks for one engine alone: GPUs, and memory on them."""
    gpus, workers = sorted(gpu_memory.totals(), reverse=True), config.actors.tensor_parallel
    if few := too_few_for_workers(config, len(gpus)):
        yield few
    elif gpus:
        needs = gpu_memory.engine_needs(config, known_model(Path(config.model.path)))
        line, fits = gpu_memory.line_of(workers - 1, gpus[workers - 1], {"engine": needs})
        if not fits:
            yield f"too little memory on a GPU: {line}; {_LESS_OF_AN_ENGINE}"


def missing_gpus(config: Config) -> str:
    """Say that no GPU can be used where the installation, or the configuration, is for GPUs."""
    if not on_cpu() and not gpu_memory.totals():
        return (
            f"this installation is for GPUs, and none can be used: {gpu_memory.why_none()}: see "
            "forage doctor for the driver that it needs, or install for the CPU, make .venv, and "
            "use .venv/bin/forage"
        )
    asked = _asked(config)
    if not asked or gpu_memory.totals():
        return ""
    count = gpus_wanted(config)
    shared = f" ({', '.join(_counts(config))})" if count > 1 else ""
    return (
        f"no GPU is visible, and this configuration is for {count}{shared}: "
        f"{', '.join(asked)}: on a machine with GPUs install for them, make .venv GPU=1, and use "
        ".venv-gpu/bin/forage; on this one begin with configs/base.yaml"
    )


def gpus_wanted(config: Config) -> int:
    """How many GPUs a configuration is for that asks for some; 0 where it runs without."""
    ranks, actors = config.learner.ranks, config.actors
    if not _asked(config):
        return 0
    apart = config.weight_sync.transport == "nccl" or ranks > 1 or actors.tensor_parallel > 1
    return ranks + actors.count * actors.tensor_parallel if apart else 1


def _asked(config: Config) -> list[str]:
    """The fields that need a GPU."""
    kind = config.weight_sync.transport
    asked = [f"weight_sync.transport = {kind!r}"] if kind in ("nccl", "cuda_ipc") else []
    for name in ("device", "index_device") if config.starts_retrieval_server else ():
        if (device := getattr(config.retrieval, name)) == "cuda":
            asked.append(f"retrieval.{name} = {device!r}")
    return asked


def too_few_gpus(config: Config) -> str:
    """Say that ranks of the learner, or workers of an engine, would have to share a GPU, which
    their collectives cannot.
    """
    gpus, ranks, actors = len(gpu_memory.totals()), config.learner.ranks, config.actors.count
    workers = config.actors.tensor_parallel
    if gpus and ranks > gpus and not config.learner.rendezvous:
        field, value, which = "learner.ranks", ranks, "rank"
    elif gpus and workers > gpus:
        field, value, which = "actors.tensor_parallel", workers, "worker of an engine"
    else:
        return ""
    others = [each for each in _counts(config) if not each.startswith(field)]
    group = "one" if workers == 1 else str(workers)
    shared = f" (its actors share {group}) to {ranks + actors * workers} (each has its own)"
    return (
        f"{field} = {value!r} on {gpus} GPU{'s' * (gpus > 1)}: each {which} needs one of its own, "
        f"so that with {' and '.join(others)} this run takes {ranks + workers}"
        f"{shared if actors > 1 else ''}: lower {field} to at most {gpus}, or see "
        "CUDA_VISIBLE_DEVICES"
    )


def _counts(config: Config) -> list[str]:
    """The fields that say how many GPUs a run is for."""
    ranks, actors = config.learner.ranks, config.actors
    counts = [f"learner.ranks = {ranks!r}", f"actors.count = {actors.count!r}"]
    several = [f"actors.tensor_parallel = {actors.tensor_parallel!r}"]
    return counts + several * (actors.tensor_parallel > 1)


def memory_needed(
    config: Config, gpus: int | None = None, model: Model | None = None
) -> dict[str, int]:
    """About how many bytes of the machine's memory a run takes, by what they are for, without what
    lies on so many GPUs (default: as here). `model`: the one at its path where none is given.
    """
    gpus = len(gpu_memory.totals()) if gpus is None else gpus
    model = known_model(Path(config.model.path)) if model is None else model
    actors, learner = config.actors, config.learner
    engine = 3 if actors.tensor_parallel == 1 else 3 + actors.tensor_parallel
    on_gpus = config.retrieval.index_device == "cuda"
    vectors = "on their way to the GPUs" if on_gpus else "retrieval.map_index leaves them in a file"
    needs = {
        f"engines ({', '.join(_counts(config)[1:])})": engine * actors.count * PROCESS_BYTES,
        f"learner (learner.ranks = {learner.ranks!r})": 2 * learner.ranks * PROCESS_BYTES,
        **(_beside_gpus if gpus else _on_host)(config, model),
        "weights on their way to actors": _sets(config, gpus) * _buckets(config, model, gpus > 0),
        "replay, retrieval server and launcher": 3 * PROCESS_BYTES,
        f"vectors ({vectors})": gpu_memory.vector_bytes(config),
    }
    return {what: size for what, size in needs.items() if size}


def _on_host(config: Config, model: Model) -> dict[str, int]:
    """Of engines and learner without GPUs."""
    actors, learner = config.actors, config.learner
    needs = gpu_memory.learner_needs(config, model, "cpu")
    tokens = f"its activations (learner.micro_batch_tokens = {learner.micro_batch_tokens!r})"
    activations, gaps = needs.pop("activations", 0), needs.pop("gaps between blocks", 0)
    head = needs.pop("head, with its gradient", 0)
    return {
        "their weights": actors.count * width_of(config.engine_dtype) * model.parameters,
        "their keys and values (actors.kv_cache_bytes)": actors.count * actors.kv_cache_bytes,
        "its weights, gradients and optimiser": learner.ranks * sum(needs.values()),
        tokens: learner.ranks * (activations + gaps),
        "its logits (learner.logprob_chunk_bytes)": learner.ranks * head,
    }


def _beside_gpus(config: Config, model: Model) -> dict[str, int]:
    """Of what the host holds besides: what is offloaded, and the copy that a checkpoint is written
    from; it is the weights' too, while they are loaded.
    """
    learner, width = config.learner, width_of(config.model.dtype)
    copies = learner.ranks if learner.zero_stage else 1
    state = copies * sum(gpu_memory.state_bytes(config, model).values())
    offloaded = learner.offload == "cpu"
    written = (0 if offloaded else state) + width * model.parameters
    loaded = learner.ranks * width * model.parameters
    # Of gradients the host has what is summed and what the optimiser reads.
    policy = sum(trained_elements(config, model))
    trained = policy + model.trunk_parameters * learner.has_critic_model
    held = state + 8 * trained
    return {
        "its optimiser, averages and gradients (learner.offload)": offloaded * held,
        "a checkpoint before it is written": max(written, loaded),
    }


def _sets(config: Config, gpus: int) -> int:
    """Sets of buckets on the host: the publisher's two, and one of each worker that lies on no GPU
    or shares its engine with others.
    """
    try:
        there = transport(config, gpus) in ("nccl", "cuda_ipc")
    except TransportUnusable:  # said elsewhere
        there = False
    workers = config.actors.tensor_parallel
    return 2 + (0 if there and workers == 1 else config.actors.count * workers)


def _buckets(config: Config, model: Model, pinned: bool) -> int:
    """Bytes of one set of buckets; on a host with a GPU they are pinned, and a pinned one takes a
    power of two.
    """
    width, sizes = width_of(config.engine_dtype), [0]
    for elements in sent_elements(config, model):
        if sizes[-1] and sizes[-1] + width * elements > config.weight_sync.bucket_bytes:
            sizes.append(0)
        sizes[-1] += width * elements
    return sum(1 << (size - 1).bit_length() if pinned and size else size for size in sizes)


def memory_by_process(config: Config, on_gpus: bool, model: Model | None = None) -> dict[str, int]:
    """Bytes of a machine's memory without which a run is refused (`least_memory`), of one rank, one
    actor, replay and one retrieval server, wherever each lies.
    """
    ranks, workers = config.learner.ranks, config.actors.tensor_parallel

    def least(count: int) -> int:
        actors = msgspec.structs.replace(config.actors, count=count)
        counted = msgspec.structs.replace(config, actors=actors)
        gpus = ranks + count * workers if on_gpus else 0
        return least_memory(memory_needed(counted, gpus, model))

    actor, vectors = least(2) - least(1), gpu_memory.vector_bytes(config)
    learner = least(1) - actor - vectors - 3 * PROCESS_BYTES
    return {
        "rank": -(-learner // ranks),
        "actor": actor,
        "replay": 2 * PROCESS_BYTES,  # and the launcher
        "retrieval_server": PROCESS_BYTES + vectors,
    }


def least_memory(needed: Mapping[str, int]) -> int:
    """The bytes without which a run is refused that needs these: caches and activations, which only
    the longest rollouts fill, count by half.
    """
    filling = (size for what, size in needed.items() if any(name in what for name in _FILLING))
    return sum(needed.values()) - sum(filling) // 2


def _memory(config: Config) -> Iterator[str]:
    needed, free = memory_needed(config), psutil.virtual_memory().available
    if least_memory(needed) <= free:
        return
    rounded = {what: round(size / gpu_memory.GIB, 2) for what, size in needed.items()}
    shown = {what: size for what, size in rounded.items() if size}
    counts = {"actors.count": config.actors.count, "learner.ranks": config.learner.ranks}
    if on_cpu():  # with GPUs, more workers is what a large model needs
        counts["actors.tensor_parallel"] = config.actors.tensor_parallel
    lower = [field for field, count in counts.items() if count > 1]
    lower += [field for field in _SIZES if any(field in what for what in shown)]
    remedies = [f"lower {', '.join(lower)}"] if lower else []
    yield (
        f"too little memory: about {sum(shown.values()):.2f} GiB are needed and "
        f"{free / gpu_memory.GIB:.2f} GiB are free: "
        f"{', '.join(f'{what} {size:.2f}' for what, size in shown.items())}: "
        f"{' or '.join([*remedies, 'name a smaller model.path'])}"
    )


def _gpu_memory(config: Config) -> Iterator[str]:
    for line, fits in gpu_plan(config):
        if not fits:
            yield (f"too little memory on a GPU: {line}; {LESS}")


def gpu_plan(config: Config) -> list[tuple[str, bool]]:
    """A line on what each GPU has to hold, and True where it can; empty on a CPU."""
    if not (gpus := gpu_memory.totals()):
        return []
    try:
        model = read_model(Path(config.model.path))
    except (OSError, ValueError, KeyError):
        return []  # what is wrong with the folder is said elsewhere
    return list(gpu_memory.plan(config, model, gpus))


def transport(config: Config, gpus: int | None = None) -> str:
    """The way the weights will travel by so many GPUs (default: as here). Raises
    TransportUnusable.
    """
    gpus = len(gpu_memory.totals()) if gpus is None else gpus
    ranks = config.learner.ranks
    workers = config.actors.tensor_parallel

    def places(actor: int) -> list[str]:
        own = gpus_of_actor(actor, ranks, gpus, workers) if gpus else ()
        return [f"GPU {gpu}" for gpu in own] or [CPU] * workers

    actors = {f"actor-{index}": places(index) for index in range(config.actors.count)}
    return choose(config.weight_sync.transport, "GPU 0" if gpus else CPU, actors)

"""The sizes that a configuration leaves to be found: what fits the model and the GPUs of a run.

They are found when a run is prepared, so that its config.yaml has numbers, by the arithmetic that
`forage memory` prints and that a run is refused by.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from configs.schema import Config
from scripts.setup.gpu_memory import GIB, HEADROOM, engine_needs, tenants, totals
from scripts.setup.model_size import Model, contexts_bytes, known_model

HOST_BYTES = 4 * GIB  # of keys and values, at most, where no GPU holds them
CACHE = "keys and values"  # of an engine's needs
UNKNOWN_BYTES = GIB  # where config.json does not tell how large they are


def fitted(config: Config, gpus: list[int] | None = None, model: Model | None = None) -> Config:
    """The configuration with `actors.kv_cache_bytes` and `learner.offload` found. `gpus`: their
    bytes; this machine's, and the model at its path, where none are given.
    """
    gpus = totals() if gpus is None else gpus
    model = known_model(Path(config.model.path)) if model is None else model
    if config.learner.offload == "auto":
        config = _offloaded(config, gpus, model)
    if config.actors.kv_cache_bytes:
        return config
    return _with_cache(config, _left(config, gpus, model) if gpus else 0, model)


def fitted_alone(config: Config, gpus: list[int] | None = None) -> Config:
    """`fitted`, for one engine on the first GPU, without a learner."""
    gpus = totals() if gpus is None else gpus
    if config.actors.kv_cache_bytes:
        return config
    model = known_model(Path(config.model.path))
    needed = sum(engine_needs(config, model).values())
    room = (_free(gpus[0]) - needed) * config.actors.tensor_parallel if gpus else 0
    return _with_cache(config, room, model)


def _offloaded(config: Config, gpus: list[int], model: Model) -> Config:
    """With the optimiser on the GPUs where a group's contexts fit beside it."""
    wanted = config.actors.kv_cache_bytes or least_cache_bytes(config, model)
    for kind in ("none", "cpu") if gpus and config.learner.zero_stage else ("none",):
        learner = msgspec.structs.replace(config.learner, offload=kind)
        config = msgspec.structs.replace(config, learner=learner)
        if not gpus or all(room >= n * wanted for room, n in _rooms(config, gpus, model)):
            break
    return config


def least_cache_bytes(config: Config, model: Model) -> int:
    """Bytes of keys and values of a group, leased to one actor together, at full length."""
    return _of_contexts(config, model, config.replay.group_size)


def _left(config: Config, gpus: list[int], model: Model) -> int:
    """Bytes that the fullest GPU leaves each of its actors, over all workers of one; below 0 where
    it cannot hold them.
    """
    room = min(room // actors for room, actors in _rooms(config, gpus, model) if actors)
    return room * config.actors.tensor_parallel


def _rooms(config: Config, gpus: list[int], model: Model) -> Iterator[tuple[int, int]]:
    """Yield what each GPU leaves for keys and values, in bytes, and for how many actors."""
    for total, there in zip(gpus, tenants(config, model, len(gpus)), strict=True):
        caches = [needs[CACHE] for needs in there.values() if CACHE in needs]
        needed = sum(sum(needs.values()) for needs in there.values())
        yield _free(total) - needed + sum(caches), len(caches)


def _free(total: int) -> int:
    return int(total * (1 - HEADROOM))


def _of_contexts(config: Config, model: Model, count: int) -> int:
    return contexts_bytes(config, model, count) or UNKNOWN_BYTES


def _with_cache(config: Config, found: int, model: Model) -> Config:
    """With so many bytes, or, where that is 0, with those of all seats; at least one context's."""
    seats = min(HOST_BYTES, _of_contexts(config, model, config.actors.max_num_seqs))
    size = max(found or seats, _of_contexts(config, model, 1))
    actors = msgspec.structs.replace(config.actors, kv_cache_bytes=size)
    return msgspec.structs.replace(config, actors=actors)

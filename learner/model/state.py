"""One rank's training state in one safetensors file: all that the next step depends on.

fp32 masters, optimiser moments and step counts, the averages' masters and update counts, and the
random generators, bit for bit. A file names the settings it was made with and is refused under
others; nothing in it is executable.
"""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from configs.schema import Config
from learner.errors import BadModel
from learner.model.ema import Averages
from learner.model.engine import Engine

FORMAT = "1"


def save_state(path: Path, config: Config, engine: Engine, averages: Averages) -> None:
    """Write this rank's state; not durable until the caller syncs it."""
    tensors = {f"master/{name}": value for name, value in engine.shards.masters().items()}
    moments = engine.optimiser_state()
    for name, master in engine.shards.masters().items():
        for key, value in moments.get(master, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimiser/{key}/{name}"] = value
    for kind, average in averages.all().items():
        tensors |= {f"{kind}/{name}": value for name, value in average.master.items()}
        tensors[f"{kind}_updates"] = torch.tensor(average.updates)
    tensors |= _random_states(engine.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(whole, path, metadata=_provenance(config, engine))


def load_state(path: Path, config: Config, engine: Engine, averages: Averages) -> None:
    """Take the state back, also into the weights that compute. Collective.

    It must hold every average that the configuration uses; others are left in it. Raises BadModel
    naming the field that differs, before anything is changed.
    """
    try:
        with safe_open(path, "pt") as file:
            _check(path, file.metadata() or {}, _provenance(config, engine))
            _check_averages(path, set(file.keys()), averages, config)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadModel(f"state {str(path)!r} cannot be read: {error}; use another one") from error
    masters, moments = engine.shards.masters(), engine.optimiser_state()
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(tensors[f"master/{name}"])
            moments.pop(master, None)
    for full, value in tensors.items():
        place, _, rest = full.partition("/")
        if place == "optimiser":
            key, _, name = rest.partition("/")
            # Step counts are scalars, which the optimiser keeps on the CPU.
            placed = value.to(masters[name].device) if value.dim() else value
            moments.setdefault(masters[name], {})[key] = placed
    for kind, average in averages.all().items():
        for name, value in average.master.items():
            value.copy_(tensors[f"{kind}/{name}"])
        average.updates = int(tensors[f"{kind}_updates"])
    engine.shards.load(engine.shards.own())
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], engine.device)


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _provenance(config: Config, engine: Engine) -> dict[str, str]:
    """The settings that give the numbers their meaning, by field."""
    shapes = sorted((name, *shape) for name, shape in engine.shapes().items())
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=6).hexdigest()
    learner = config.learner
    return {
        "format": FORMAT,
        "model.path": f"{type(engine.model).__name__} {digest}",
        "model.dtype": config.model.dtype,
        "learner.ranks": str(learner.ranks),
        "learner.rank": str(engine.rank),
        "learner.zero_stage": str(learner.zero_stage),
        "learner.optimiser": learner.optimiser,
        "learner.anchor": learner.anchor,
        "learner.master": ",".join(f"{n}:{m.numel()}" for n, m in engine.shards.masters().items()),
    }


def _check(path: Path, found: dict[str, str], expected: dict[str, str]) -> None:
    for field, value in expected.items():
        if found.get(field) != value:
            what = "another architecture" if field == "model.path" else "another setting"
            raise BadModel(
                f"state {str(path)!r} was made with {what}: {field} = {found.get(field)!r} there, "
                f"{value!r} here; resume with the run's own {field}, or start a new run from the "
                "checkpoint's model/ folder"
            )


def _check_averages(path: Path, found: set[str], averages: Averages, config: Config) -> None:
    for kind in averages.all():
        if f"{kind}_updates" not in found:
            field = "proximal" if kind == "ema" else "anchor"
            raise BadModel(
                f"state {str(path)!r} holds no {kind!r}, the average of learner.{field} = "
                f"{getattr(config.learner, field)!r}: resume with the run's own learner.{field}, "
                "or start a new run from the checkpoint's model/ folder"
            )

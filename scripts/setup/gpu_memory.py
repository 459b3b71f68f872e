"""The memory that each GPU has to hold, before anything is started on it.

Activations after Korthikanti et al. 2022 (arXiv 2205.05198): about 34 bytes for each token, hidden
unit and layer in 16-bit training whose attention scores are never stored; with gradient
checkpointing 2, and 34 of one layer. It is an estimate: leave some room.
"""

import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from actors.policies.engine import gpu_of_actor
from configs.devices import on_cpu
from configs.load import ConfigError, load
from configs.runtime.process import Exit
from configs.schema import Config
from scripts.options import Options, argument, option, overrides

GIB = 1 << 30
CONTEXT_BYTES = GIB // 2  # of CUDA, in each process
ENGINE_BYTES = 2 * GIB  # activations, logits and CUDA graphs of an engine, roughly
LOGITS = 3  # pieces of learner.logprob_chunk_bytes at once


@dataclass(frozen=True)
class MemoryOptions(Options):
    """The options of `forage memory`; `gpus` and `gib` describe a machine other than this one."""

    config: str = argument("a YAML file, for example configs/one_gpu.yaml")
    overrides: tuple[str, ...] = overrides()
    gpus: int | None = option("for so many GPUs, instead of this machine's", metavar="N", least=1)
    gib: float = option("the memory of each of them", default=80.0, least=1)


def memory(options: MemoryOptions) -> int:
    """Print what each GPU has to hold; failed where that does not fit. Raises ConfigError."""
    config = load(options.config, options.overrides)
    gpus = [int(options.gib * GIB)] * options.gpus if options.gpus else totals()
    if not gpus:
        raise ConfigError("no GPU here: reckon for another machine, --gpus N --gib SIZE")
    try:
        model = read_model(Path(config.model.path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its size cannot be read ({error}): name a "
            "Hugging Face folder"
        ) from error
    found = list(plan(config, model, gpus))
    for line, fits in found:
        print(line if fits else f"{line}: TOO MUCH")
    return Exit.DONE if all(fits for _, fits in found) else Exit.FAILED


@dataclass(frozen=True)
class Model:
    """A model's size, as far as its memory depends on it."""

    parameters: int
    hidden: int
    layers: int


def read_model(path: Path) -> Model:
    """From a Hugging Face folder. Raises OSError, ValueError, KeyError where there is none."""
    config = json.loads((path / "config.json").read_text())
    parameters = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                parameters += math.prod(tensors.get_slice(name).get_shape())
    return Model(parameters, config["hidden_size"], config["num_hidden_layers"])


def totals() -> list[int]:
    """Bytes of each GPU that this process may use; none on an installation for the CPU."""
    if on_cpu():
        return []
    torch = importlib.import_module("torch")
    return [
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    ]


def read_shape(path: Path) -> tuple[int, int]:
    """Hidden size and layers of a model folder; zeros where they are not said."""
    try:
        tree = json.loads((path / "config.json").read_text())
        return tree["hidden_size"], tree["num_hidden_layers"]
    except (OSError, ValueError, KeyError):
        return 0, 0


def activation_bytes(config: Config, hidden: int, layers: int) -> int:
    """Bytes of the activations of one rank's micro-batch."""
    learner, width = config.learner, 2 if config.model.dtype == "bfloat16" else 4
    token_bytes = 34 * width // 2 * hidden
    if learner.gradient_checkpointing:
        token_bytes += 2 * width // 2 * hidden * layers
    else:
        token_bytes *= layers
    step = config.replay.groups_per_step * config.replay.group_size * config.model.max_model_len
    return min(learner.micro_batch_tokens, step) * token_bytes


def learner_needs(config: Config, model: Model) -> dict[str, int]:
    """Bytes of one rank, by what they are for."""
    learner, count = config.learner, model.parameters
    width = 2 if config.model.dtype == "bfloat16" else 4
    # ZeRO shares out the optimiser's state from stage 1, gradients from 2, weights from 3.
    shared = {stage: learner.ranks if learner.zero_stage >= stage else 1 for stage in (1, 2, 3)}
    averages = 1 + (learner.anchor != "none")  # the proximal one is kept, and saved, in every mode
    return {
        "weights": width * count // shared[3],
        "gradients": 4 * count // shared[2],
        "optimiser, with fp32 weights": (8 + (4 if width == 2 else 0)) * count // shared[1],
        "EMA": 4 * averages * count // shared[1],
        "activations": activation_bytes(config, model.hidden, model.layers),
        "log-probs": LOGITS * learner.logprob_chunk_bytes,
        "weights shown to actors": width * count,
        "CUDA": CONTEXT_BYTES,
    }


def engine_needs(config: Config, model: Model) -> dict[str, int]:
    """Bytes of one actor, by what they are for."""
    width = 2 if config.engine_dtype == "bfloat16" else 4
    return {
        "weights": width * model.parameters,
        "keys and values": config.actors.kv_cache_bytes,
        "engine": ENGINE_BYTES,
        "weights received": width * model.parameters,
        "CUDA": CONTEXT_BYTES,
    }


def plan(config: Config, model: Model, gpus: list[int]) -> Iterator[tuple[str, bool]]:
    """Yield, for each GPU in use, a line on what it must hold, and True where that fits."""
    ranks, actors = config.learner.ranks, config.actors.count
    homes = {f"learner rank {rank}": rank % len(gpus) for rank in range(ranks)}
    homes |= {f"actor-{index}": gpu_of_actor(index, ranks, len(gpus)) for index in range(actors)}
    for gpu, total in enumerate(gpus):
        tenants = {
            who: (engine_needs if who.startswith("actor") else learner_needs)(config, model)
            for who, home in homes.items()
            if home == gpu
        }
        if tenants:
            yield _line(gpu, total, tenants)


def _line(gpu: int, total: int, tenants: dict[str, dict[str, int]]) -> tuple[str, bool]:
    def shown(needs: dict[str, int]) -> str:
        return ", ".join(f"{what} {size / GIB:.2f}" for what, size in needs.items())

    needed = sum(sum(needs.values()) for needs in tenants.values())
    detail = "; ".join(
        f"{who} {sum(needs.values()) / GIB:.1f} ({shown(needs)})" for who, needs in tenants.items()
    )
    line = f"GPU {gpu}: about {needed / GIB:.1f} of {total / GIB:.1f} GiB: {detail}"
    return line, needed <= total

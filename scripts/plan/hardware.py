"""Constants that a plan is reckoned from: GPUs, a CPU's core, replay, retrieval, weight sync.

Of GPUs they are their makers' figures, less what is not reached; of replay, retrieval and gloo,
figures of docs/benchmarks.md, measured on two shared cores; of a CPU's core, fitted to figures
there. docs/plan.md has them in a table.
"""

import difflib
import math
from dataclasses import dataclass

import numpy as np

from configs.load import ConfigError
from scripts.setup.gpu_memory import GIB

MOVED, DONE = 0.8, 0.4  # reached, of a GPU's bytes/s and operations/s: as in scripts/setup/pace.py
LAUNCH_S = 0.010  # of an engine's step on a GPU, beside what its bytes and tokens take
PAUSE_S = 0.015  # of generation for new weights, beside writing them: bench weight-sync, p50
DIGEST_BYTES_PER_S = 4.7e9  # blake3, one core: bench weight-sync
# Of a version on its way: over gloo as measured with three receivers; the others are not measured.
SENT_BYTES_PER_S = {"gloo": 1.05e9, "snapshot": 1.0e9, "nccl": 10e9, "cuda_ipc": 100e9}

# Of one core: bench end-to-end and engine (demo: .23 ms a token with 256 seats, 16 seats of 8
# layers 12 ms), bench learner (15,700 tokens/s; 135 million parameters: 261 on two threads).
CORE_LAUNCH_S, CORE_SEQUENCE_S = 0.009, 2.0e-4
CORE_TOKEN_S = 1.0e-5  # of training, beside its operations
CORE_OPERATIONS_PER_S = {"bfloat16": 1.06e11, "float32": 0.35e11}
FRONTEND_CORES = 0.3  # of the actor, replay and retrieval beside a busy engine
CORE_BESIDE = 1.2  # a token .25-.38 ms to sample in a run, .21-.25 alone, on two cores
CORE_QUEUED = 1.15  # an update takes that much longer beside an engine: bench plan
CORE_PAUSE_S = 0.030
LEARNER_FAVOUR = 1.25**5  # Linux's share of a core by niceness, of which actors have 5 more

# Trajectories/s of one replay server by actors, 2,048 tokens each: bench stream
REPLAY = {1: 5307.0, 16: 4862.0, 256: 4493.0, 1000: 3686.0}
REPLAY_TOKENS = 2048
# Searches/s of one retrieval server on two cores, in groups of 8: bench retrieval
SERVERS = {"bm25": 6880.0, "dense": 589.0}


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: its memory as CUDA tells it, bytes/s, dense bf16 operations/s."""

    gib: float
    bytes_per_s: float
    operations_per_s: float

    @property
    def total(self) -> int:
        """Its memory in bytes."""
        return int(self.gib * GIB)

    @property
    def moved(self) -> float:
        """Bytes/s that are reached."""
        return MOVED * self.bytes_per_s

    @property
    def done(self) -> float:
        """Operations/s that are reached."""
        return DONE * self.operations_per_s


GPUS = {
    "L4": Gpu(22.0, 0.30e12, 121e12),
    "A10G": Gpu(22.0, 0.60e12, 125e12),
    "RTX3090": Gpu(23.5, 0.936e12, 71e12),
    "RTX4090": Gpu(23.5, 1.008e12, 165e12),
    "L40S": Gpu(44.4, 0.864e12, 362e12),
    "A100-40GB": Gpu(39.4, 1.555e12, 312e12),
    "A100": Gpu(79.0, 2.0e12, 312e12),
    "H100": Gpu(79.0, 3.35e12, 989e12),
    "H800": Gpu(79.0, 3.35e12, 989e12),
    "H20": Gpu(95.0, 4.0e12, 148e12),
    "H200": Gpu(139.8, 4.8e12, 989e12),
    "B200": Gpu(178.0, 8.0e12, 2250e12),
}


def gpu_of(name: str) -> Gpu:
    """The GPU of that name, however it is written. Raises ConfigError with near ones."""
    plain = {_plain(each): each for each in GPUS}
    if (asked := _plain(name)) in plain:
        return GPUS[plain[asked]]
    near = [
        each for key, each in plain.items() if (key and key in asked) or (asked and asked in key)
    ]
    near = near or [plain[each] for each in difflib.get_close_matches(asked, plain, cutoff=0.5)]
    meant = f"did you mean {' or '.join(near[:2])}?" if near else f"one of {', '.join(GPUS)}"
    raise ConfigError(f"--gpu {name!r} is no GPU whose figures are known: {meant}")


def _plain(name: str) -> str:
    text = "".join(each for each in name.lower() if each.isalnum())
    return text.removeprefix("nvidia").removeprefix("geforce").removesuffix("80gb")


def replay_per_s(actors: int, tokens: float = REPLAY_TOKENS) -> float:
    """Trajectories/s of one replay server with so many actors; longer ones cost it by their length,
    shorter ones no less than those measured. Beyond a thousand actors nothing is measured.
    """
    known = sorted(REPLAY.items())
    rate = np.interp(math.log(actors), [math.log(n) for n, _ in known], [r for _, r in known])
    return float(rate) / max(1.0, tokens / REPLAY_TOKENS)

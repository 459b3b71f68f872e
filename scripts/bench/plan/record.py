"""What the children of `forage bench plan` are told, and what they write."""

import msgspec

ShapeTree = tuple[int, tuple[tuple[int, int, bool, int], ...]]  # `scripts.plan.workload.Shape`


class PartsJob(msgspec.Struct, frozen=True):
    """The order to measure a part of a model: a configuration file and overrides, the retrieval
    server's base URL and process id, batches to roll out, seconds before and in each window, a
    folder for what is written.
    """

    config: str
    overrides: tuple[str, ...]
    server: tuple[str, int]
    in_flight: tuple[int, ...]
    batches: int
    window: tuple[float, float]
    updates: int
    folder: str


class Rate(msgspec.Struct, frozen=True):
    """Generation with so many rollouts in flight, of which so many are in the engine on average:
    sampled tokens/s, cores of all who take part, seconds of a search (p50).
    """

    in_flight: int
    running: float
    tokens_per_s: float
    cores: float
    search_s: float


class Generation(msgspec.Struct, frozen=True):
    """Generation alone: by rollouts in flight, the last of them with all seats taken; `prefill_s`
    of a token that is taken in; `rollouts`, question by question with so many `siblings`.
    """

    alone: tuple[Rate, ...]
    prefill_s: float
    rollouts: tuple[ShapeTree, ...]
    siblings: int


class Training(msgspec.Struct, frozen=True):
    """A step of the learner alone on so many tokens: its seconds and processor seconds."""

    tokens: int
    update_s: float
    cpu_s: float


class Parts(msgspec.Struct, frozen=True):
    """A model's parts, each with the machine to itself."""

    generation: Generation
    training: Training

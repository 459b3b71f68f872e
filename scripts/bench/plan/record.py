"""What the child of `forage bench plan` is told, and what it writes."""

import msgspec

TurnTree = tuple[int, int, bool, int, int, int, int]  # `scripts.plan.workload.Turn`
ShapeTree = tuple[int, tuple[TurnTree, ...]]  # `Shape` there


class GenerationJob(msgspec.Struct, frozen=True):
    """The order to measure a model's generation: a configuration file and overrides, the retrieval
    server's base URL and process id, rollouts in flight, batches to roll out, seconds before and in
    each window, and where to write the `Generation`.
    """

    config: str
    overrides: tuple[str, ...]
    server: tuple[str, int]
    in_flight: tuple[int, ...]
    batches: int
    window: tuple[float, float]
    out: str


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
    of a token that is taken in; `rollouts`, question by question with so many `siblings`; `block`:
    tokens of a block of the engine's cache.
    """

    alone: tuple[Rate, ...]
    prefill_s: float
    rollouts: tuple[ShapeTree, ...]
    siblings: int
    block: int

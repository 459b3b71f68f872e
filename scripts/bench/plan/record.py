"""What the children of `forage bench plan` are told, and what they write."""

import msgspec


class PartsJob(msgspec.Struct, frozen=True):
    """The order to measure a model's parts: a configuration file and overrides, the retrieval
    server's base URL and process id, seconds before and in each window, a folder for what is
    written.
    """

    config: str
    overrides: tuple[str, ...]
    server: tuple[str, int]
    in_flight: tuple[int, ...]
    window: tuple[float, float]
    updates: int
    folder: str


class Rate(msgspec.Struct, frozen=True):
    """Generation with so many rollouts in flight: sampled tokens/s, cores of all who take part."""

    in_flight: int
    tokens_per_s: float
    cores: float


class Training(msgspec.Struct, frozen=True):
    """A step of the learner alone: its seconds and processor seconds, and those of a probe with a
    copy of all weights.
    """

    update_s: float
    cpu_s: float
    publish_s: float


class Parts(msgspec.Struct, frozen=True):
    """A model's parts. `alone`: generation by rollouts in flight; `beside`: the last of them while
    training goes on, whose step then takes `update_beside_s`. `rollouts`: prompt, then of each turn
    sampled tokens, tokens read, and whether they come of a search.
    """

    alone: tuple[Rate, ...]
    beside: Rate
    update_beside_s: float
    training: Training
    prefill_s: float  # of a token
    rollouts: tuple[tuple[int, tuple[tuple[int, int, bool], ...]], ...]

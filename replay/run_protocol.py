"""Messages about a run as a whole: of the launcher, and of an actor about to join."""

import msgspec

from replay.message import Message


class EvalResult(msgspec.Struct, frozen=True):
    """One finished evaluation: exact match over all its questions, and by hops (as strings)."""

    step: int
    questions: int
    em: float  # greedy
    sampled_em: float  # T = 1
    em_by_hops: dict[str, float]
    sampled_em_by_hops: dict[str, float]
    searches: float  # mean per greedy rollout
    oldest_version: int
    newest_version: int


class StepReport(msgspec.Struct, frozen=True):
    """One learner step's gauges."""

    step: int
    gauges: dict[str, float]


# ---- launcher → replay


class Observe(Message, frozen=True):
    """Launcher → replay: ask how the run stands, for what comes after these counts."""

    after_step: int
    after_evaluation: int


class Status(Message, frozen=True):
    """Reply to Observe."""

    steps: tuple[StepReport, ...]
    evaluations: tuple[EvalResult, ...]
    gauges: dict[str, float]
    fleet: dict[str, dict[str, float]]
    phase: str  # what replay is doing or waiting for, in words
    stop_cause: str  # empty while running


class Shutdown(Message, frozen=True):
    """Launcher → replay: stop leasing, answer Sample with Stop(cause)."""

    cause: str


# ---- an actor about to join → replay


class Describe(Message, frozen=True):
    """An actor about to join → replay: ask what the run is. The server answers at any time."""


class Described(Message, frozen=True):
    """Reply to Describe: the run's resolved configuration, as YAML."""

    config: str

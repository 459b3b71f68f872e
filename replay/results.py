"""What a run has come to, as messages and records carry it: evaluations and steps. A leaf."""

import msgspec


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

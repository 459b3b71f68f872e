"""TensorBoard files in `<run_dir>/tensorboard`, and one number of a fleet's gauges by name.

No other module writes TensorBoard.
"""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from replay.protocol import EvalResult, SetResult

# Counters of one process; the fleet's is their sum. Everything else not named below is averaged.
COUNTERS = {
    "requests",
    "errors",
    "retried",
    "failovers",
    "lost_requests",
    "failed_leases",
    "token_mismatch",
    "rollouts_in_flight",
    "queued_requests",
    "capacity",
    "action_tokens",
}


def aggregate(fleet: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One number per name over the actors: the sum of rates and counters, the worst p99 and max,
    the mean of others.

    An actor that does not report a name does not count in its mean.
    """
    by_name: dict[str, list[float]] = {}
    for gauges in fleet.values():
        for name, value in gauges.items():
            by_name.setdefault(name, []).append(value)
    return {name: _combine(name, values) for name, values in by_name.items()}


def _combine(name: str, values: list[float]) -> float:
    leaf = name.rsplit("/", 1)[-1]
    if leaf.endswith(("_per_s", "_total", "_count")) or leaf in COUNTERS:
        return sum(values)
    if "p99" in leaf or leaf.endswith("_max"):
        return max(values)
    if leaf.endswith("_min") or leaf == "policy_version":
        return min(values)
    return sum(values) / len(values)


def evaluation_gauges(result: EvalResult) -> dict[str, float]:
    """An evaluation as `eval/*`: greedy and sampled exact match, over all questions and by hops,
    and what else was scored; of each data set as `eval/SET/*`.
    """
    gauges = _set_gauges("eval", result) | {
        "eval/oldest_version": float(result.oldest_version),
        "eval/newest_version": float(result.newest_version),
        **{f"eval/em_hops_{hops}": em for hops, em in result.em_by_hops.items()},
        **{f"eval/sampled_em_hops_{hops}": em for hops, em in result.sampled_em_by_hops.items()},
    }
    for name, found in result.sets.items():
        gauges |= _set_gauges(f"eval/{name}", found)
    return gauges


def _set_gauges(prefix: str, result: EvalResult | SetResult) -> dict[str, float]:
    sampled = {} if result.sampled_em is None else {f"{prefix}/sampled_em": result.sampled_em}
    return sampled | {
        f"{prefix}/em": result.em,
        f"{prefix}/searches_per_rollout": result.searches,
        f"{prefix}/questions": float(result.questions),
        **{f"{prefix}/{part}": mean for part, mean in result.parts.items()},
        **{f"{prefix}/sampled_{part}": mean for part, mean in result.sampled_parts.items()},
    }


class Metrics:
    """The run's event files; use as a context manager."""

    def __init__(self, run_dir: str | Path, purge_step: int | None = None) -> None:
        """`purge_step` hides what an earlier process of the run wrote at that step and after it."""
        self._writer = SummaryWriter(
            str(Path(run_dir) / "tensorboard"), purge_step=purge_step, flush_secs=10
        )

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Write numbers by name at a step."""
        for name, value in gauges.items():
            self._writer.add_scalar(name, value, step)

    def evaluation(self, result: EvalResult) -> None:
        """Write an evaluation at its step."""
        self.write(result.step, evaluation_gauges(result))
        self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system: what is flushed outlives this process."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()

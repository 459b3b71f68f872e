"""A run's numbers: one of a fleet's gauges by name, an evaluation's, and where they go."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from learner.batch import TrainingBatch
from learner.metrics.histograms import histograms
from learner.metrics.samples import samples
from learner.metrics.tensorboard import TensorBoard
from replay.protocol import Batch, EvalResult

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
    """An evaluation as `eval/*`: greedy and sampled exact match, over all questions and by hops."""
    sampled = {} if result.sampled_em is None else {"eval/sampled_em": result.sampled_em}
    return sampled | {
        "eval/em": result.em,
        "eval/searches_per_rollout": result.searches,
        "eval/questions": float(result.questions),
        "eval/oldest_version": float(result.oldest_version),
        "eval/newest_version": float(result.newest_version),
        **{f"eval/em_hops_{hops}": em for hops, em in result.em_by_hops.items()},
        **{f"eval/sampled_em_hops_{hops}": em for hops, em in result.sampled_em_by_hops.items()},
    }


class Metrics:
    """The run's numbers, handed to TensorBoard; use as a context manager."""

    def __init__(
        self,
        run_dir: str | Path,
        purge_step: int | None = None,
        config: Config | None = None,
    ) -> None:
        """`purge_step` hides what an earlier process of the run wrote at that step and after it.
        With the run's `config` come the charts of the layout and the hyper-parameters.
        """
        self._board = TensorBoard(run_dir, purge_step, config)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Write numbers by name at a step."""
        self._board.write(step, gauges)

    def trained(
        self, step: int, shares: Sequence[TrainingBatch], gauges: Mapping[str, float]
    ) -> None:
        """Write the histograms of a step that was trained."""
        self._board.histograms(step, histograms(shares, gauges))

    def rollouts(self, batch: Batch, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a few rollouts of the batch of a step, as text."""
        self._board.texts("rollouts", batch.step, samples(batch, tokenizer))

    def evaluation(self, result: EvalResult) -> None:
        """Write an evaluation at its step."""
        self.write(result.step, evaluation_gauges(result))
        self._board.result(result.step, {"final/em": result.em})
        self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system: what is flushed outlives this process."""
        self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        self._board.close()

"""A run's numbers: one of a fleet's gauges by name, an evaluation's, and where they go."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from transformers import PreTrainedTokenizerBase

from configs.runtime.files import write_json
from configs.schema import Config
from learner.batch import TrainingBatch
from learner.metrics.histograms import histograms
from learner.metrics.relay import Relay
from learner.metrics.samples import samples
from learner.metrics.settings import told_config
from learner.metrics.tensorboard import TensorBoard
from learner.metrics.tracker import Opening
from replay.protocol import Batch, EvalResult, SetResult

ID_FILE = "tracker.json"  # in the run's directory: the id under which trackers know it
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
    "in_flight",
    "running_requests",
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
    """The run's numbers, handed to its trackers; use as a context manager."""

    def __init__(
        self,
        run_dir: str | Path,
        purge_step: int | None = None,
        config: Config | None = None,
    ) -> None:
        """Without `config`, TensorBoard alone. `purge_step` hides there what an earlier process of
        the run wrote at that step and after it.
        """
        names = dict.fromkeys(config.learner.trackers if config else ("tensorboard",))
        self._board = TensorBoard(run_dir, purge_step, config) if "tensorboard" in names else None
        others = [name for name in names if name != "tensorboard"]
        opening = _opening(Path(run_dir), config) if config and others else None
        self._relays = [Relay(name, opening) for name in others if opening]

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Write numbers by name at a step."""
        if self._board:
            self._board.write(step, gauges)
        for relay in self._relays:
            relay.write(step, gauges)

    def trained(
        self, step: int, shares: Sequence[TrainingBatch], gauges: Mapping[str, float]
    ) -> None:
        """Write the histograms of a step that was trained."""
        if self._board:
            self._board.histograms(step, histograms(shares, gauges))

    def rollouts(self, batch: Batch, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a few rollouts of the batch of a step, as text."""
        if self._board:
            self._board.texts("rollouts", batch.step, samples(batch, tokenizer))

    def evaluation(self, result: EvalResult) -> None:
        """Write an evaluation at its step."""
        self.write(result.step, evaluation_gauges(result))
        if self._board:
            self._board.result(result.step, {"final/em": result.em})
        self.flush()

    def gauges(self) -> dict[str, float]:
        """How many writes each tracker did not get."""
        return {
            f"learner/{relay.name}_dropped_count": float(relay.dropped) for relay in self._relays
        }

    def flush(self) -> None:
        """Hand the event files to the operating system: what is flushed outlives this process."""
        if self._board:
            self._board.flush()

    def close(self) -> None:
        """Flush and close; a tracker has `learner.tracker_deadline_s` to end."""
        if self._board:
            self._board.close()
        for relay in self._relays:
            relay.close()


def _opening(run_dir: Path, config: Config) -> Opening:
    path = run_dir / ID_FILE
    if not path.exists():
        write_json(path, secrets.token_hex(4))
    return Opening(
        project=config.learner.tracker_project,
        name=run_dir.resolve().name,
        id=msgspec.json.decode(path.read_bytes(), type=str),
        folder=str(run_dir),
        config=told_config(config),
        deadline_s=config.learner.tracker_deadline_s,
    )

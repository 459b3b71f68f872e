"""The workload of a run that was, by its log."""

from pathlib import Path
from statistics import quantiles

from configs.load import ConfigError
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered
from replay.protocol import ReplayError
from replay.trajectory import Trajectory
from scripts.plan.workload import Latency, Shape, Turn, Workload
from scripts.runs.log import log_of


def workload_of_run(run: Path, no_signal: float) -> Workload:
    """Its training rollouts, as many as its log still holds, and the latency of their searches.
    Raises ConfigError where there are none.
    """
    shapes, seconds = list[Shape](), list[float]()
    try:
        for record in read(log_of(run)):
            if isinstance(record, Delivered) and record.summary.kind == "train" and record.payload:
                rollout = decode_trajectory(record.payload)
                shapes.append(shape_of(rollout))
                seconds += searched_s(rollout)
    except ReplayError:
        pass  # of a run that was cut off, up to there
    if not shapes:
        raise ConfigError(f"--like {str(run)!r}: its log holds no rollouts that were trained on")
    return Workload(tuple(shapes), latency_of(seconds), no_signal)


def shape_of(rollout: Trajectory) -> Shape:
    """What a rollout looked like."""
    turns = tuple(
        Turn(
            len(turn.action_tokens),
            len(turn.observation_tokens),
            any(search.status != "skipped" for search in turn.searches),
        )
        for turn in rollout.turns
    )
    return Shape(len(rollout.prompt_tokens), turns)


def searched_s(rollout: Trajectory) -> list[float]:
    """Seconds of each of its searches."""
    made = (search for turn in rollout.turns for search in turn.searches)
    return [search.seconds for search in made if search.status != "skipped"]


def latency_of(seconds: list[float]) -> Latency:
    """The latency of these searches: their median and p99."""
    if len(seconds) < 2:
        return Latency(0.0, 0.0)
    cuts = quantiles(seconds, n=100, method="inclusive")
    median = max(cuts[49], 1e-6)
    return Latency(median, max(median, cuts[98]))

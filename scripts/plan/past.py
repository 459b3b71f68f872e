"""The workload of a run that was, by its log."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import quantiles

import numpy as np
from numpy.typing import NDArray

from configs.load import ConfigError
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered
from replay.protocol import ReplayError
from replay.trajectory import TokenSequence, Trajectory
from scripts.plan.workload import Latency, Shape, Turn, Workload
from scripts.runs.log import log_of


def workload_of_run(run: Path, no_signal: float, block: int) -> Workload:
    """Its training rollouts, as many as its log still holds, and the latency of their searches;
    `block`: tokens of a block of the engines' caches. Raises ConfigError where there are none.
    """
    groups: dict[int, list[Trajectory]] = {}
    try:
        for record in read(log_of(run)):
            if isinstance(record, Delivered) and record.summary.kind == "train" and record.payload:
                rollout = decode_trajectory(record.payload)
                groups.setdefault(rollout.group_id, []).append(rollout)
    except ReplayError:
        pass  # of a run that was cut off, up to there
    if not groups:
        raise ConfigError(f"--like {str(run)!r}: its log holds no rollouts that were trained on")
    rollouts = (rollout for group in groups.values() for rollout in group)
    seconds = [each for rollout in rollouts for each in searched_s(rollout)]
    return workload_of_groups(groups.values(), latency_of(seconds), block, no_signal)


def workload_of_groups(
    groups: Iterable[Sequence[Trajectory]], latency: Latency, block: int, no_signal: float = 0.0
) -> Workload:
    """The rollouts of these groups, siblings together; of groups of several sizes the commonest.
    `block`: tokens of a block of the engines' caches.
    """
    groups = list(groups)
    siblings = Counter(map(len, groups)).most_common(1)[0][0]
    whole = (shapes_of(group, block) for group in groups if len(group) == siblings)
    shapes = tuple(shape for group in whole for shape in group)
    return Workload(shapes, latency, no_signal, siblings)


def shapes_of(group: Sequence[Trajectory], block: int) -> list[Shape]:
    """What the rollouts of a group looked like; who asked the same has the same `query`."""
    queries: dict[tuple[str, ...], int] = {}
    wholes = [[sequence.tokens for sequence in rollout.sequences] for rollout in group]
    found = []
    for number, rollout in enumerate(group):
        others = [each for n, of in enumerate(wholes) if n != number for each in of]
        turns = list[Turn]()
        for place, sequence in enumerate(rollout.sequences):
            known = _shared(sequence.prompt_tokens, wholes[number][:place], block)
            prompt = len(sequence.prompt_tokens) if place else 0
            for turn, context in zip(sequence.turns, contexts_of(sequence), strict=True):
                asked = tuple(s.query for s in turn.searches if s.status != "skipped")
                turns.append(
                    Turn(
                        len(turn.action_tokens),
                        len(turn.observation_tokens),
                        bool(asked),
                        queries.setdefault(asked, len(queries) + 1) if asked else 0,
                        _shared(context, others, block),
                        prompt,
                        known,
                    )
                )
                prompt = known = 0
        found.append(Shape(len(rollout.prompt_tokens), tuple(turns)))
    return found


def contexts_of(sequence: TokenSequence) -> list[NDArray[np.int32]]:
    """The token ids before each turn of a sequence."""
    parts = [(turn.action_tokens, turn.observation_tokens) for turn in sequence.turns[:-1]]
    lengths = [len(sequence.prompt_tokens), *(len(one) + len(two) for one, two in parts)]
    return [sequence.tokens[:end] for end in np.cumsum(lengths)]


def _shared(context: NDArray[np.int32], others: Iterable[NDArray[np.int32]], block: int) -> int:
    """How many tokens of a context any of the others begins with, in whole blocks."""
    return max((common(context, other) for other in others), default=0) // block * block


def common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens two contexts begin with alike."""
    length = min(len(one), len(other))
    apart = np.flatnonzero(one[:length] != other[:length])
    return int(apart[0]) if len(apart) else length


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

"""The answer to what a run did when: lanes in bins of time, versions, and events as marks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.load import ConfigError
from scripts.command.terminal import clean
from scripts.view.bins import (
    FACTOR,
    STRIDE,
    WIDTHS,
    Changes,
    Parts,
    averages,
    changes,
    coarser,
    together,
)
from scripts.view.index import Index
from scripts.view.lanes import (
    ACTORS,
    APPLY,
    ASKED,
    BEHIND,
    BUSY,
    ENGINES,
    FILLING,
    GENERATE,
    HELD,
    KV,
    LEARNER,
    LEASE,
    OWN_ENGINES,
    PUBLISH,
    QUEUED,
    READY,
    RECEIVE,
    REPLAY,
    RETRIEVAL,
    RUNNING,
    RUNS,
    SEARCH,
    STATES,
    TOLD,
    TRAIN,
    UNKNOWN,
    WAIT,
    WEIGHTS,
    Lanes,
)
from scripts.view.spans import unpacked

MOST_BINS_IN_ALL = 5600  # bins of all lanes of one answer
MOST_BINS = 800  # of a lane
MOST_LANES = 32
MOST_READ = 20_000  # spans that are read one by one; more are told by cells
MOST_MARKS = 500  # and versions
LEAST_S = 0.01  # of a span of time
_SHOWN = {
    "actor": (GENERATE, SEARCH, HELD, UNKNOWN),
    "learner": (TRAIN, PUBLISH, WAIT),
    "replay": (READY, FILLING),
    "retrieval": (ASKED,),
    "apply": (APPLY, RECEIVE),
}
_SAMPLED = {"actor": LEASE, "apply": BEHIND}  # and of a run whose launcher wrote samples


def timeline(
    index: Index, run: int, begin: float | None, end: float | None, most: int = MOST_BINS_IN_ALL
) -> dict[str, Any]:
    """A run's lanes between two times, by default all. Raises ConfigError."""
    if not 0 <= run < len(index.runs):
        raise ConfigError(f"run {run}: there is no such run")
    told = index.runs[run]
    first, last = told.first, max(told.last, told.lanes.sampled_s, told.first + LEAST_S)
    begin = first if begin is None else min(max(begin, first), last - LEAST_S)
    end = last if end is None else max(min(end, last), begin + LEAST_S)
    names = sorted(told.lanes.actors.items(), key=lambda each: each[1])
    sampled = told.lanes.sampled_s > 0
    others = 2 + told.lanes.searched + (told.lanes.applied or sampled)
    shown = min(len(names) * (1 + sampled) + others, MOST_LANES)
    bins = max(1, min(MOST_BINS * most // MOST_BINS_IN_ALL, most // shown))
    begin, width, levels = _levels(index, run, begin, end, bins, len(names) + ACTORS)
    end = begin + width * levels.shape[1]
    return {
        "run": run,
        "first": first,
        "last": last,
        "from": begin,
        "to": end,
        "width": width,
        "bins": levels.shape[1],
        "lanes": _lanes(levels, [clean(name) for name, _ in names], told.lanes),
        "sampled": sampled,
        "versions": _versions(index, run, begin, end),
        "marks": _marks(index, run, begin, end, width),
    }


def _levels(
    index: Index, run: int, begin: float, end: float, bins: int, lanes: int
) -> tuple[float, float, NDArray[np.float64]]:
    """Where the bins begin, how long one is, and the levels by key and bin."""
    told = index.runs[run]
    span = (run, begin, end + told.longest, end)
    among = "FROM spans WHERE run = ? AND ended >= ? AND ended <= ? AND begun <= ?"
    (count,) = index.rows(f"SELECT count(*) FROM (SELECT 1 {among} LIMIT {MOST_READ + 1})", span)[0]
    keys = lanes * STRIDE
    if count <= MOST_READ:
        width = (end - begin) / bins
        found = changes(unpacked(index.rows(f"SELECT parts {among}", span)), begin, width)
    else:
        begin, width, bins, found = _cells(index, run, begin, end, bins)
    now = changes(Parts.of(index.under_way(run)), begin, width)
    return begin, width, averages(together(found, now), keys, bins, width)


def _cells(
    index: Index, run: int, begin: float, end: float, bins: int
) -> tuple[float, float, int, Changes]:
    """The same of the cells that are kept."""
    level = max((n for n, w in enumerate(WIDTHS) if w * bins <= end - begin), default=0)
    cell = WIDTHS[level]
    first, last = int(begin // cell), int(end // cell)
    times = -(-(last + 1 - first) // bins)  # cells of a bin
    bins = -(-(last + 1 - first) // times)
    rows = index.rows(
        "SELECT cell, key, count, seconds FROM cells WHERE run = ? AND level = ? AND cell >= ? "
        "AND cell < ?",
        (run, level, first, first + times * bins),
    )
    table = np.array(rows, np.float64).reshape(-1, 4)
    cells, keys = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
    found = coarser(Changes(cells, keys, table[:, 2], table[:, 3]), first, times, cell)
    before = np.array(_before(index, run, level, first), np.float64).reshape(-1, 2)
    nothing = np.zeros(len(before))
    earlier = Changes(
        np.full(len(before), -1, np.int64), before[:, 0].astype(np.int64), before[:, 1], nothing
    )
    return first * cell, times * cell, bins, together(found, earlier)


def _before(index: Index, run: int, level: int, cell: int) -> list[tuple[Any, ...]]:
    """By key the sums of changes before a cell: of the longest cells, then of shorter ones."""
    found = list[tuple[Any, ...]]()
    until = cell
    for each in range(level, len(WIDTHS)):
        above = until // FACTOR
        first = above * FACTOR if each + 1 < len(WIDTHS) else -(2**62)
        found += index.rows(
            "SELECT key, sum(count) FROM cells WHERE run = ? AND level = ? AND cell >= ? "
            "AND cell < ? GROUP BY key",
            (run, each, first, until),
        )
        until = above
    return found


def _lanes(levels: NDArray[np.float64], actors: Sequence[str], told: Lanes) -> list[dict[str, Any]]:
    """The lanes: those of the actors that were there and of their engines, retrieval and weights
    where the run has any, learner, replay.
    """
    sampled = told.sampled_s > 0
    by_lane = levels.reshape(-1, STRIDE, levels.shape[1])
    signs = [HELD, UNKNOWN, LEASE, TOLD]
    there = [n for n in range(len(actors)) if by_lane[n + ACTORS, signs].max(initial=0) > 0]
    there.sort(key=lambda n: actors[n])
    own = len(actors) <= OWN_ENGINES
    found = _of_actors([(actors[n], by_lane[n + ACTORS]) for n in there], sampled, sampled and own)
    if sampled and not own:
        summed = by_lane[[ENGINES, *(n + ACTORS for n in there)]].sum(axis=0)
        found.append(_engine("", summed, len(there)) | {"others": len(there)})
    if told.searched:
        found.append(_lane("retrieval", "retrieval", by_lane[RETRIEVAL], sampled))
    if told.applied or sampled:
        found.append(_lane("apply", "weights", by_lane[WEIGHTS], sampled))
    found.append(_lane("learner", "learner", by_lane[LEARNER], sampled))
    found.append(_lane("replay", "replay", by_lane[REPLAY], sampled))
    return found


def _of_actors(
    actors: Sequence[tuple[str, NDArray[np.float64]]], sampled: bool, engines: bool
) -> list[dict[str, Any]]:
    """The lanes of actors, below each its engine's if wanted; of too many some share one."""
    most = MOST_LANES - ACTORS
    alone = actors if len(actors) <= most else actors[: most - 1]
    found = []
    for name, levels in alone:
        found.append(_lane("actor", name, levels, sampled))
        if engines:
            found.append(_engine(name, levels, 1))
    if others := [levels for _, levels in actors[len(alone) :]]:
        summed = np.sum(others, axis=0)
        summed[BUSY] /= len(others)
        found.append(_lane("actor", "", summed, sampled) | {"others": len(others)})
    return found


def _lane(kind: str, name: str, levels: NDArray[np.float64], sampled: bool) -> dict[str, Any]:
    """A lane; with what samples tell, where the run has any (`sampled`)."""
    by_state = {STATES[state]: levels[state] for state in _SHOWN[kind]}
    if kind == "actor":
        other = by_state.pop("held") - by_state["generate"] - by_state["search"]
        by_state |= {"other": np.maximum(other, 0.0), "unknown": by_state.pop("unknown")}
    if sampled and kind in _SAMPLED:
        by_state[STATES[_SAMPLED[kind]]] = levels[_SAMPLED[kind]]
    return {
        "kind": kind,
        "name": name,
        "busy": _state("busy", np.minimum(levels[BUSY], 1.0)),
        "states": [_state(name, each) for name, each in by_state.items()],
    }


def _engine(name: str, levels: NDArray[np.float64], count: int) -> dict[str, Any]:
    """The lane of an engine, or of so many; shares are those of all."""
    by_state = {
        "running": levels[RUNNING],
        "queued": levels[QUEUED],
        "untold": np.maximum(1.0 - levels[TOLD] / max(count, 1), 0.0),
        "kv": levels[KV] / (100 * max(count, 1)),
    }
    return {
        "kind": "engine",
        "name": name,
        "busy": _state("busy", np.minimum(levels[RUNS] / max(count, 1), 1.0)),
        "states": [_state(name, each) for name, each in by_state.items()],
    }


def _state(name: str, levels: NDArray[np.float64]) -> dict[str, Any]:
    mean = round(float(levels.mean()), 4)
    return {"name": name, "mean": mean, "levels": np.round(levels, 3).tolist()}


def _versions(index: Index, run: int, begin: float, end: float) -> list[tuple[float, int]]:
    """When versions were published; that of the begin too."""
    published = "SELECT at, step FROM steps WHERE run = ? AND published AND at"
    found = index.rows(f"{published} < ? ORDER BY at DESC LIMIT 1", (run, begin))
    inside = index.rows(f"{published} BETWEEN ? AND ? ORDER BY at", (run, begin, end))
    found += inside[:: -(-len(inside) // MOST_MARKS) or 1]
    return [(at, step) for at, step in found]


def _marks(index: Index, run: int, begin: float, end: float, width: float) -> list[dict[str, Any]]:
    """Events: those of a kind in a bin as one, with the words of the first."""
    wide = max(width, (end - begin) / MOST_MARKS)
    found = index.rows(
        "SELECT min(at), kind, count(*), said FROM events WHERE run = ? AND at BETWEEN ? AND ? "
        "GROUP BY kind, CAST((at - ?) / ? AS INTEGER) ORDER BY 1",
        (run, begin, end, begin, wide),
    )
    return [
        {"at": at, "kind": kind, "count": count, "said": said} for at, kind, count, said in found
    ]

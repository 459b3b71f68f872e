"""The arithmetic: a cell's figures, the ideal, and the ratios between cells."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.bench.end_to_end.plan import BASELINE, MODES, WARM_UP, Cell
from scripts.bench.end_to_end.record import Parts, Record
from scripts.bench.end_to_end.usage import Usage

EM_GOAL = 0.9
ENGINES = 2  # of the asynchronous modes
_T_95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's, two-sided, by degrees of freedom
Row = dict[str, Any]


def figures(record: Record, usage: Usage, warm_up: int = WARM_UP) -> Row:
    """The figures of the steps after the uncounted ones; per step where nothing else is said."""
    before, steps = record.steps[warm_up - 1], record.steps[warm_up:]
    begin_s, end_s = before.at_s, steps[-1].at_s
    seconds, count = end_s - begin_s, len(steps)
    tokens = sum(step.tokens for step in steps)
    update_s = sum(step.update_s for step in steps) / count
    wait_s = sum(step.wait_s for step in steps) / count
    return {
        "step_s": seconds / count,
        "update_s": update_s,
        "wait_s": wait_s,
        "rest_s": seconds / count - update_s - wait_s,
        "pause_s": sum(step.pause_s for step in steps) / count,
        "tokens": tokens / count,
        "tokens_per_s": tokens / seconds,
        "sampled_over_trained": sum(step.sampled for step in steps) / tokens,
        "staleness": sum(step.staleness * step.tokens for step in steps) / tokens,
        "staleness_max": max(step.staleness_max for step in steps),
        "learner_idle": 1.0 - update_s * count / seconds,
        "engine_idle": usage.idle("engine", begin_s, end_s),
        "cpu": {role: used / seconds for role, used in usage.cpu_s(begin_s, end_s).items()},
    }


def learning(record: Record) -> Row:
    """What a whole run came to: exact match at the end, and the seconds to `EM_GOAL`."""
    last = record.evaluations[-1]
    reached = (each.after_s for each in record.evaluations if each.em >= EM_GOAL)
    return {"em": last.em, "sampled_em": last.sampled_em, "em_goal_s": next(reached, None)}


def ideal_token_s(parts: Parts, engines: int, cores: int) -> float:
    """The least seconds of a trained token: generation on all engines, training, or all that both
    need of the processors, whichever is most, each as it is alone.
    """
    generation_s = 1.0 / (parts.tokens_per_s * engines)
    training_s = parts.update_s / parts.update_tokens
    cpu_s = parts.token_cpu_s + parts.update_cpu_s / parts.update_tokens
    return max(generation_s, training_s, cpu_s / cores)


def synchronous(kinds: Sequence[str] = ("sync", "lockstep")) -> list[str]:
    """The modes of these kinds."""
    return [name for name, mode in MODES.items() if mode.kind in kinds]


def over(rows: Iterable[Row], mode: str, others: Sequence[str], latency: str) -> float | None:
    """Tokens a second of a mode over those of the best of `others`: the median over seeds; None
    where a seed has not both.
    """
    rates: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["latency"] == latency and not row["learns"]:
            rates.setdefault(row["seed"], {})[row["mode"]] = row["tokens_per_s"]
    ratios = [
        found[mode] / max(found[each] for each in others if each in found)
        for found in rates.values()
        if mode in found and any(each in found for each in others)
    ]
    return statistics.median(ratios) if ratios else None


def over_ideal(
    rows: Iterable[Row], parts: Mapping[int, Parts], mode: str, latency: str, cores: int
) -> float | None:
    """Tokens a second of a mode over the ideal's of its seed: the median over seeds."""
    ratios = [
        row["tokens_per_s"] * ideal_token_s(parts[row["seed"]], ENGINES, cores)
        for row in rows
        if (row["mode"], row["latency"], row["learns"]) == (mode, latency, False)
        and row["seed"] in parts
    ]
    return statistics.median(ratios) if ratios else None


def summary(rows: Sequence[Row], parts: Mapping[int, Parts], mode: str, cores: int) -> Row:
    """The figures by name, of the asynchronous `mode`; what was not measured is None."""
    tail = [row for row in rows if row["latency"] == "tail" and not row["learns"]]
    own = [row for row in tail if row["mode"] == mode]
    return {
        "async_over_lockstep": over(rows, mode, synchronous(["lockstep"]), "tail"),
        "async_over_overlapped": over(rows, mode, synchronous(["sync"]), "tail"),
        "async_over_ideal": over_ideal(rows, parts, mode, "tail", cores),
        "async_over_ideal_scaled": over_ideal(rows, parts, mode, "scaled", cores),
        "async_over_sync_zero_latency": over(rows, mode, synchronous(), "zero"),
        "learner_idle": _median(own, "learner_idle"),
        "engine_idle": _median(own, "engine_idle"),
        "em_by_mode": em_by_mode(rows) or None,
    }


def em_by_mode(rows: Iterable[Row]) -> Row:
    """Of whole runs, by mode: exact match over seeds and its difference from the baseline of the
    same seed, with its 95 % interval; seconds to the goal, the median of the runs that reached it.
    """
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["learns"]:
            found.setdefault(row["mode"], {})[row["seed"]] = row
    base = found.get(BASELINE, {})
    return {mode: _em(by_seed, base) for mode, by_seed in found.items()}


def _em(by_seed: Mapping[int, Row], base: Mapping[int, Row]) -> Row:
    both = sorted(by_seed.keys() & base.keys())
    differences = [by_seed[seed]["em"] - base[seed]["em"] for seed in both]
    rows = list(by_seed.values())
    return {
        "seeds": sorted(by_seed),
        "em": statistics.fmean(row["em"] for row in rows),
        "sampled_em": statistics.fmean(row["sampled_em"] for row in rows),
        "reached": sum(row["em_goal_s"] is not None for row in rows),
        "em_goal_s": _median(rows, "em_goal_s"),
        "difference": statistics.fmean(differences) if differences else None,
        "interval": interval(differences),
    }


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % interval; None of fewer than two values."""
    if len(values) < 2:
        return None
    t = _T_95.get(len(values) - 1, 2.0)
    return float(t * statistics.stdev(values) / len(values) ** 0.5)


def row_of(cell: Cell, found: Row) -> Row:
    """A cell's row of the table."""
    return {"mode": cell.mode, "latency": cell.latency, "seed": cell.seed, **found} | {
        "learns": cell.learns
    }


def _median(rows: Iterable[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else None

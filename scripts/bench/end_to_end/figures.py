"""The arithmetic: a cell's figures, the ideal, and the ratios between cells."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.bench.end_to_end.plan import BASELINE, RIVALS, Cell
from scripts.bench.end_to_end.record import Parts, Record, Step
from scripts.bench.end_to_end.task import Task
from scripts.bench.end_to_end.usage import Usage

EM_GOAL = 0.9
Row = dict[str, Any]


def figures(record: Record, usage: Usage, warm_up: int) -> Row:
    """The figures of the steps after the uncounted ones; per step where nothing else is said. The
    pace is of tokens that were sampled and trained on in these steps: what was ready before is no
    part of it.
    """
    before, steps = record.steps[warm_up - 1], record.steps[warm_up:]
    begin_s, end_s = before.at_s, steps[-1].at_s
    seconds, count = end_s - begin_s, len(steps)
    tokens, sampled = sum(step.tokens for step in steps), sum(step.sampled for step in steps)
    update_s = sum(step.update_s for step in steps) / count
    wait_s = sum(step.wait_s for step in steps) / count
    generate_s, search_s = _of_a_turn(steps)
    return {
        "step_s": seconds / count,
        "update_s": update_s,
        "wait_s": wait_s,
        "oldest_s": sum(step.oldest_s for step in steps) / count,
        "rest_s": seconds / count - update_s - wait_s,
        "pause_s": sum(step.pause_s for step in steps) / count,
        "tokens": tokens / count,
        "tokens_per_s": min(tokens, sampled) / seconds,
        "sampled_over_trained": sampled / tokens,
        "staleness": sum(step.staleness * step.tokens for step in steps) / tokens,
        "staleness_max": max(step.staleness_max for step in steps),
        "learner_idle": 1.0 - update_s * count / seconds,
        "engine_idle": usage.idle("engine", begin_s, end_s),
        "cpu": {role: used / seconds for role, used in usage.cpu_s(begin_s, end_s).items()},
        "generate_s": generate_s,
        "search_s": search_s,
        "search_share": search_s / generate_s if generate_s else None,
    }


def _of_a_turn(steps: Sequence[Step]) -> tuple[float, float]:
    """The mean seconds of a turn's generation, and of a search."""
    found = [step.turns for step in steps]
    turns, searches = sum(each.turns for each in found), sum(each.searches for each in found)
    generate_s, search_s = (sum(e.generate_s for e in found), sum(e.search_s for e in found))
    return generate_s / max(1, turns), search_s / max(1, searches)


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


def of_ideal(row: Row, parts: Parts, engines: int, cores: int) -> float:
    """A cell's tokens a second over the ideal's."""
    return float(row["tokens_per_s"] * ideal_token_s(parts, engines, cores))


def synchronous(task: Task, kinds: Sequence[str]) -> list[str]:
    """The task's modes of these kinds."""
    return [name for name, mode in task.modes.items() if mode.kind in kinds]


def over(rows: Iterable[Row], mode: str, others: Sequence[str], latency: str) -> float | None:
    """Tokens a second of a mode over those of the best of the `others` that were measured: the
    median over the seeds that have all of them; None where there is none, or none but of pace 0.
    """
    rows = list(rows)
    known = measured(rows, others, latency)
    rates: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["latency"] == latency and not row["learns"]:
            rates.setdefault(row["seed"], {})[row["mode"]] = row["tokens_per_s"]
    ratios = [
        found[mode] / best
        for found in rates.values()
        if known and found.keys() >= {mode, *known} and (best := max(found[k] for k in known))
    ]
    return statistics.median(ratios) if ratios else None


def measured(rows: Iterable[Row], modes: Sequence[str], latency: str) -> list[str]:
    """The modes whose pace at this latency any seed has."""
    found = {row["mode"] for row in rows if row["latency"] == latency and not row["learns"]}
    return [mode for mode in modes if mode in found]


def rivals(rows: Sequence[Row], task: Task) -> Row:
    """By ratio: the synchronous modes of which the best was taken, and those not measured."""
    told = {}
    for name, (latency, kinds) in RIVALS.items():
        known = measured(rows, synchronous(task, kinds), latency)
        missing = [mode for mode in synchronous(task, kinds) if mode not in known]
        told[name] = {"measured": known, "missing": missing}
    return told


def over_ideal(
    rows: Iterable[Row],
    parts: Mapping[int, Parts],
    mode: str,
    latency: str,
    *,
    engines: int,
    cores: int,
) -> float | None:
    """A mode beside the ideal of its seed (`of_ideal`): the median over seeds."""
    ratios = [
        of_ideal(row, parts[row["seed"]], engines, cores)
        for row in rows
        if (row["mode"], row["latency"], row["learns"]) == (mode, latency, False)
        and row["seed"] in parts
    ]
    return statistics.median(ratios) if ratios else None


def summary(
    rows: Sequence[Row], parts: Mapping[int, Parts], task: Task, mode: str, cores: int
) -> Row:
    """The figures by name, of the asynchronous `mode`; what was not measured is None."""

    def beside_ideal(latency: str) -> float | None:
        return over_ideal(rows, parts, mode, latency, engines=task.engines, cores=cores)

    tail = [row for row in rows if row["latency"] == "tail" and not row["learns"]]
    own = [row for row in tail if row["mode"] == mode]
    ratios = {
        name: over(rows, mode, synchronous(task, kinds), latency)
        for name, (latency, kinds) in RIVALS.items()
    }
    em = em_by_mode(rows)
    return ratios | {
        "rivals": rivals(rows, task),
        "async_over_ideal": beside_ideal("tail"),
        "async_over_ideal_scaled": beside_ideal("scaled"),
        "learner_idle": _median(own, "learner_idle"),
        "engine_idle": _median(own, "engine_idle"),
        "em_difference": em[mode]["difference"] if mode in em else None,
        "em_by_mode": em or None,
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
        "sampled_em": _mean(rows, "sampled_em"),
        "reached": sum(row["em_goal_s"] is not None for row in rows),
        "em_goal_s": _median(rows, "em_goal_s"),
        "difference": statistics.fmean(differences) if differences else None,
        "interval": interval(differences),
    }


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % interval; None of fewer than two values."""
    if len(values) < 2:
        return None
    return float(t_95(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5)


def t_95(freedom: int) -> float:
    """Student's t within whose ± lie 95 %, by bisection of its finite series in the angle atan(t /
    √freedom) (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    terms = 0.0
    for power in range(2 + odd, freedom + 1, 2):
        terms += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    return 2 / math.pi * (angle + math.sin(angle) * terms) if odd else math.sin(angle) * terms


def row_of(cell: Cell, found: Row) -> Row:
    """A cell's row of the table."""
    return {"mode": cell.mode, "latency": cell.latency, "seed": cell.seed, **found} | {
        "learns": cell.learns
    }


def _median(rows: Iterable[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else None


def _mean(rows: Iterable[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.fmean(values) if values else None

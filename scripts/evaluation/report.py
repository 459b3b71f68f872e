"""The figures of an evaluation, from its rows: per environment and set, and over the sets. Pure.

Every row counts: a failed rollout scores 0, and is counted as failed. `scores` depend on answers
alone, `timing` on the machine. Intervals are of the bootstrap over questions, where the value of a
question is the mean over its samples; pass@k is the unbiased estimate of Chen et al. (2021, arXiv
2107.03374, equation 1).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from scripts.evaluation.bootstrap import Means, interval, pooled, resampled_means
from scripts.evaluation.rows import Asked, QuestionSet, Row

MACRO, MICRO = "macro average", "micro average"  # of sets, and of questions
Figures = dict[str, Any]  # of one environment on one set


def figures_of(
    sets: Sequence[QuestionSet],
    environments: Sequence[str],
    samples: int,
    rows: Mapping[Asked, Row],
) -> dict[str, dict[str, Figures]]:
    """Environment → set → figures; of several sets also averages: macro of scores, micro of all."""
    return {name: _of_method(sets, name, samples, rows) for name in environments}


def ks_of(samples: int) -> list[int]:
    """The k of pass@k: powers of two, and the number of samples; none where there is one."""
    powers = [2**n for n in range(1, samples.bit_length()) if 2**n < samples]
    return [*powers, samples] if samples > 1 else []


def _of_method(
    sets: Sequence[QuestionSet], environment: str, samples: int, rows: Mapping[Asked, Row]
) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    resampled: list[dict[str, Means]] = []
    means: list[dict[str, float]] = []
    everything: list[Row] = []
    for each in sets:
        found = [
            [rows[Asked(environment, each.name, question.id, n)] for n in range(samples)]
            for question in each.questions
        ]
        values = _values(found)
        means.append({metric: fmean(of) for metric, of in values.items()})
        key = f"{environment} {each.name}"
        resampled.append({m: resampled_means(of, f"{key} {m}") for m, of in values.items()})
        flat = [row for group in found for row in group]
        everything += flat
        figures[each.name] = _figures(means[-1], resampled[-1], flat, len(found))
    if len(sets) > 1:
        sizes = [float(len(each.questions)) for each in sets]
        macro = _averages(means, resampled, [1.0] * len(sets))
        micro = _averages(means, resampled, sizes)
        figures[MACRO] = {"questions": int(sum(sizes)), "scores": _scores(*macro)}
        figures[MICRO] = _figures(*micro, everything, int(sum(sizes)))
    return figures


def _values(found: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    values = {
        metric: [fmean(getattr(row, metric) for row in group) for group in found]
        for metric in ("em", "f1", "substring")
    }
    for k in ks_of(len(found[0])):
        values[f"pass@{k}"] = [
            pass_at_k(sum(row.em == 1.0 for row in group), len(group), k) for group in found
        ]
    return values


def _averages(
    means: Sequence[Mapping[str, float]],
    resampled: Sequence[Mapping[str, Means]],
    weights: Sequence[float],
) -> tuple[dict[str, float], dict[str, Means]]:
    """The weighted averages over sets. Each is resampled on its own: sets are chosen, not drawn."""
    total = sum(weights)
    mean = {
        metric: sum(w * each[metric] for w, each in zip(weights, means, strict=True)) / total
        for metric in means[0]
    }
    return mean, {
        metric: pooled([each[metric] for each in resampled], weights) for metric in resampled[0]
    }


def _figures(
    means: Mapping[str, float], resampled: Mapping[str, Means], rows: Sequence[Row], questions: int
) -> Figures:
    ended = [row for row in rows if not row.failure]
    hops = sorted({row.hops for row in rows if row.hops})
    return {
        "questions": questions,
        "rows": len(rows),
        "answered": sum(row.answer is not None for row in ended),
        "no_answer": sum(row.answer is None for row in ended),
        "failed": len(rows) - len(ended),
        "failures": dict(Counter(row.failure.partition(":")[0] for row in rows if row.failure)),
        "scores": _scores(means, resampled),
        "em_by_hops": {str(n): fmean(row.em for row in rows if row.hops == n) for n in hops},
        "stops": dict(sorted(Counter(row.stop for row in ended).items())),
        "searches": _mean([len(row.searches) for row in ended]),
        "turns": _mean([row.turns for row in ended]),
        "malformed": _mean([row.malformed for row in ended]),
        "prompt_tokens": _mean([row.prompt_tokens for row in ended]),
        "action_tokens": _mean([row.action_tokens for row in ended]),
        "observation_tokens": _mean([row.observation_tokens for row in ended]),
        "timing": _timing(ended),
    }


def _scores(
    means: Mapping[str, float], resampled: Mapping[str, Means]
) -> dict[str, dict[str, float]]:
    intervals = {metric: interval(resampled[metric]) for metric in means}
    return {
        metric: {"mean": mean, "low": intervals[metric][0], "high": intervals[metric][1]}
        for metric, mean in means.items()
    }


def _timing(ended: Sequence[Row]) -> dict[str, float]:
    rollouts = [row.seconds for row in ended]
    searches = [search.seconds for row in ended for search in row.searches]
    return {
        f"{name}_p{part}_s": percentile(values, part / 100)
        for name, values in (("rollout", rollouts), ("search", searches))
        for part in (50, 99)
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k): the chance that one of k is correct. Raises ValueError."""
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k!r}: there are {samples!r} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The quantile, interpolated between neighbours; 0 without values."""
    return float(np.quantile(values, fraction)) if values else 0.0

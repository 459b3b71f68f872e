"""Two evaluations of the same questions, compared question by question. Pure.

The difference of a metric has the interval of the bootstrap over questions, both values of a
question drawn together. `p` is of the exact two-sided test of the questions on which the two differ
in exact match: McNemar's (1947) where each was asked once, else the sign test of their means.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from scripts.evaluation.bootstrap import Means, interval, pooled, resampled_means
from scripts.evaluation.report import MICRO
from scripts.evaluation.rows import Asked, QuestionSet, Row

METRICS = ("em", "f1", "substring")
Pairs = dict[str, list[tuple[float, float]]]  # metric → a question's values, ours and theirs
Known = Mapping[Asked, Row]


def compared(
    sets: Sequence[QuestionSet],
    environments: Sequence[str],
    samples: int,
    ours: Known,
    theirs: Known,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Environment → set → comparison, over the questions that both have rows of; of several sets
    also over all questions. Without a common question there is none.
    """
    return {
        name: found
        for name in environments
        if (found := _of_method(sets, name, samples, ours, theirs))
    }


def p_of(better: int, worse: int) -> float:
    """Twice the chance of so few of either among as many fair coins; at most 1."""
    coins, fewer = better + worse, min(better, worse)
    logs = [
        math.lgamma(coins + 1) - math.lgamma(k + 1) - math.lgamma(coins - k + 1)
        for k in range(fewer + 1)
    ]
    return min(1.0, 2.0 * math.fsum(math.exp(each - coins * math.log(2.0)) for each in logs))


def _of_method(
    sets: Sequence[QuestionSet], environment: str, samples: int, ours: Known, theirs: Known
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    every: list[Pairs] = []
    resampled: list[dict[str, Means]] = []
    for each in sets:
        pairs = _pairs(each, environment, samples, ours, theirs)
        if not pairs["em"]:
            continue
        means = {
            metric: resampled_means([a - b for a, b in of], f"{environment} {each.name} {metric}")
            for metric, of in pairs.items()
        }
        found[each.name] = _comparison(pairs, means, len(each.questions))
        every.append(pairs)
        resampled.append(means)
    if len(found) > 1:
        whole: Pairs = {m: [pair for pairs in every for pair in pairs[m]] for m in METRICS}
        sizes = [float(len(pairs["em"])) for pairs in every]
        means = {metric: pooled([each[metric] for each in resampled], sizes) for metric in METRICS}
        found[MICRO] = _comparison(whole, means, sum(len(each.questions) for each in sets))
    return found


def _pairs(asked: QuestionSet, environment: str, samples: int, ours: Known, theirs: Known) -> Pairs:
    pairs: Pairs = {metric: [] for metric in METRICS}
    for question in asked.questions:
        rollouts = [Asked(environment, asked.name, question.id, n) for n in range(samples)]
        if all(each in ours and each in theirs for each in rollouts):
            for metric, values in pairs.items():
                both = ([getattr(of[each], metric) for each in rollouts] for of in (ours, theirs))
                mine, other = map(fmean, both)
                values.append((mine, other))
    return pairs


def _comparison(pairs: Pairs, means: Mapping[str, Means], asked: int) -> dict[str, Any]:
    better = sum(mine > other for mine, other in pairs["em"])
    worse = sum(mine < other for mine, other in pairs["em"])
    comparison: dict[str, Any] = {
        "questions": len(pairs["em"]),
        "left_out": asked - len(pairs["em"]),
        "better": better,
        "worse": worse,
        "p": p_of(better, worse),
    }
    for metric, of in pairs.items():
        low, high = interval(means[metric])
        comparison[metric] = {
            "here": fmean(mine for mine, _ in of),
            "there": fmean(other for _, other in of),
            "difference": fmean(mine - other for mine, other in of),
            "low": low,
            "high": high,
        }
    return comparison

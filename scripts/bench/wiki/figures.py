"""The arithmetic: exact match by method, hops and kind, paired differences, behaviour. Pure.

A unit is a question of a seed. Intervals are of the bootstrap over these, all seeds' together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from scripts.bench.wiki.measured import Outcome
from scripts.evaluation.bootstrap import interval, resampled_means

Key = tuple[int, str]  # seed, question
Rows = Mapping[Key, Outcome]
Table = Mapping[str, Mapping[str, Rows]]  # by method, greedy or sampled
Figures = dict[str, Any]


def mean(values: Mapping[Key, float], name: str) -> Figures | None:
    """The mean with its 95 % interval, and each seed's; None of no questions."""
    if not values:
        return None
    seeds = sorted({seed for seed, _ in values})
    by_seed = {str(n): fmean(v for (seed, _), v in values.items() if seed == n) for n in seeds}
    low, high = interval(resampled_means([values[key] for key in sorted(values)], name))
    return {
        "mean": round(fmean(values.values()), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "questions": len(values),
        "by_seed": {seed: round(value, 4) for seed, value in by_seed.items()},
    }


def em(rows: Rows, name: str) -> Figures | None:
    """Exact match; a rollout that failed counts as wrong."""
    return mean({key: row.em for key, row in rows.items()}, name)


def difference(ours: Rows, theirs: Rows, name: str) -> Figures | None:
    """Ours minus theirs over the questions that both were asked, and how many only one got."""
    both = ours.keys() & theirs.keys()
    apart = {key: ours[key].em - theirs[key].em for key in both}
    found = mean(apart, name)
    if found is None:
        return None
    gained, lost = (sum(sign * d > 0 for d in apart.values()) for sign in (1, -1))
    return found | {"only_ours": gained, "only_theirs": lost}


def behaviour(rows: Rows) -> Figures | None:
    """What rollouts did that ended; None of none. `malformed` is a share of the turns, and
    `answered` of the rollouts.
    """
    ended = [row for row in rows.values() if row.ended]
    if not ended:
        return None
    searches, turns = sum(row.searches for row in ended), sum(row.turns for row in ended)
    words = sum(row.query_words for row in ended)
    return {
        "searches": round(searches / len(ended), 3),
        "words_per_query": round(words / searches, 2) if searches else None,
        "malformed": round(sum(row.malformed for row in ended) / max(1, turns), 4),
        "action_tokens": round(fmean(row.action_tokens for row in ended), 1),
        "answered": round(fmean(row.answered for row in ended), 4),
    }


def per_sampling(table: Mapping[str, Rows], figure: Callable[[Rows, str], Any], name: str) -> Any:
    """A figure greedy and sampled."""
    return {how: figure(rows, f"{name} {how}") for how, rows in table.items()}


def grouped(table: Table, groups: Mapping[Key, str], order: Iterable[str]) -> Figures:
    """Exact match by group of questions and method."""
    found: Figures = {}
    for group in order:
        mine = {key for key, of in groups.items() if of == group}
        found[group] = {"questions": len(mine)}
        for name, by_sampling in table.items():
            kept = {
                how: {key: row for key, row in rows.items() if key in mine}
                for how, rows in by_sampling.items()
            }
            found[group][name] = per_sampling(kept, em, f"{name} {group}")
    return found


def differences(table: Table, ours: str) -> Figures:
    """That of `ours` from every other method, paired by question."""
    return {
        name: {
            how: difference(table[ours][how], rows, f"{ours} over {name} {how}")
            for how, rows in by_sampling.items()
        }
        for name, by_sampling in table.items()
        if name != ours
    }


def by_frequency(names: Sequence[str]) -> list[str]:
    """Each name once, the commonest first."""
    return sorted(dict.fromkeys(names), key=lambda name: -names.count(name))

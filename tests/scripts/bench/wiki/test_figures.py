"""The figures of the wiki benchmark, against naive transcriptions over made-up rows."""

import random
from statistics import fmean

import numpy as np
import pytest

from scripts.bench.wiki import figures
from scripts.bench.wiki.figures import Key
from scripts.bench.wiki.measured import Outcome

KINDS = ("origin", "older")


def rows(chance: float, seeds: int = 3, questions: int = 40) -> dict[Key, Outcome]:
    drawn = random.Random(chance)
    keys = [(seed, f"q{n}") for seed in range(seeds) for n in range(questions)]
    return {key: Outcome(float(drawn.random() < chance)) for key in keys}


def resampled(values: list[float]) -> tuple[float, float]:
    """Naively: draw as many with replacement, 4,000 times, and take the middle 95 %."""
    drawn = random.Random(1)
    means = [fmean(drawn.choices(values, k=len(values))) for _ in range(4000)]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def test_exact_match_is_over_the_questions_of_all_seeds() -> None:
    asked = rows(0.4)
    found = figures.em(asked, "some")
    assert found is not None and found["questions"] == 120
    assert found["mean"] == pytest.approx(sum(r.em for r in asked.values()) / 120, abs=1e-4)
    low, high = resampled([each.em for each in asked.values()])
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=0.015)
    of_first = [each.em for (seed, _), each in asked.items() if seed == 0]
    assert found["by_seed"]["0"] == pytest.approx(fmean(of_first), abs=1e-4)
    assert figures.em({}, "none") is None


def test_a_difference_is_paired_by_question() -> None:
    ours, theirs = rows(0.6), rows(0.3)
    del theirs[0, "q0"], ours[2, "q5"]
    found = figures.difference(ours, theirs, "both")
    both = [key for key in ours if key in theirs]
    apart = [ours[key].em - theirs[key].em for key in both]
    assert found is not None and found["questions"] == len(both) == 118
    assert found["mean"] == pytest.approx(fmean(apart), abs=1e-4)
    assert (found["low"], found["high"]) == pytest.approx(resampled(apart), abs=0.02)
    assert (found["only_ours"], found["only_theirs"]) == (apart.count(1.0), apart.count(-1.0))
    assert figures.difference(ours, {}, "nothing") is None


def test_pairing_makes_an_interval_narrow() -> None:
    ours = rows(0.5)
    found = figures.difference(ours, ours, "the same")
    assert found is not None and (found["low"], found["mean"], found["high"]) == (0.0, 0.0, 0.0)


def test_groups_hold_their_own_questions_of_each_method() -> None:
    table = {"a": {"greedy": rows(0.5), "sampled": {}}, "b": {"greedy": rows(0.2), "sampled": {}}}
    kinds = {key: KINDS[int(key[1][1:]) % 3 == 0] for key in table["a"]["greedy"]}
    found = figures.grouped(table, kinds, KINDS)
    for kind in KINDS:
        ems = [r.em for key, r in table["b"]["greedy"].items() if kinds[key] == kind]
        assert found[kind]["questions"] == found[kind]["b"]["greedy"]["questions"] == len(ems)
        assert found[kind]["b"]["greedy"]["mean"] == pytest.approx(fmean(ems), abs=1e-4)
        assert found[kind]["a"]["sampled"] is None


def test_differences_are_from_every_other_method() -> None:
    table = {name: {"greedy": rows(c)} for name, c in (("a", 0.5), ("b", 0.2), ("c", 0.9))}
    found = figures.differences(table, "b")
    assert list(found) == ["a", "c"]
    assert found["c"]["greedy"]["mean"] < found["a"]["greedy"]["mean"] < 0


def test_behaviour_counts_what_rollouts_did() -> None:
    rolled = {
        (0, "a"): Outcome(1.0, turns=3, action_tokens=60, searches=2, query_words=4),
        (0, "b"): Outcome(0.0, answered=False, turns=2, malformed=1, action_tokens=30),
        (0, "c"): Outcome(0.0, ended=False, answered=False, turns=0),
    }
    assert figures.behaviour(rolled) == {
        "searches": 1.0,  # of the two that ended
        "words_per_query": 2.0,
        "malformed": 0.2,
        "action_tokens": 45.0,
        "answered": 0.5,
    }
    quiet = figures.behaviour({(0, "b"): rolled[0, "b"]})
    assert quiet is not None and quiet["words_per_query"] is None
    assert figures.behaviour({(0, "c"): rolled[0, "c"]}) is None


def test_the_commonest_kind_comes_first() -> None:
    assert figures.by_frequency(["a", "b", "b", "c", "c"]) == ["b", "c", "a"]

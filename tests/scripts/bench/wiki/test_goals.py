"""The goals of the wiki benchmark: what is reached, and what is not there yet."""

from typing import Any

from scripts.bench.wiki.goals import GOALS, reached


def between(low: float, high: float) -> dict[str, dict[str, float]]:
    figures = {"mean": (low + high) / 2, "low": low, "high": high}
    return {"greedy": figures, "sampled": figures}


def met(em: dict[str, Any], apart: float) -> dict[str, bool]:
    difference = {"supervised": between(apart, apart)}
    found = reached(em, difference)
    return {
        name: goal.met(value) for name, goal in GOALS.items() if (value := found[name]) is not None
    }


def test_intervals_that_touch_overlap() -> None:
    em = {"trained": between(0.5, 0.6), "no_search": between(0.1, 0.4999), "rag": between(0.4, 0.5)}
    assert met(em, 0.0) == {
        "over_no_search_greedy": True,
        "over_no_search_sampled": True,
        "over_rag_greedy": False,
        "over_rag_sampled": False,
        "minus_supervised_sampled": True,
    }
    assert not met(em, -0.0001)["minus_supervised_sampled"]


def test_what_is_not_there_yet_is_none() -> None:
    nothing = {"greedy": None, "sampled": None}
    em = {"trained": between(0.5, 0.6), "no_search": nothing, "rag": nothing}
    assert {*reached(em, {"supervised": nothing}).values()} == {None}

"""The goals of the wiki benchmark: what is reached, and what is not there yet."""

from typing import Any

from scripts.bench.wiki.goals import GOALS, reached

WELL = {"token_mismatches": 0, "refits": 0, "retrieval_errors": 0}
NAMES = ("no_search", "rag", "no_search_trained", "rag_trained")


def between(low: float, high: float) -> dict[str, dict[str, Any]]:
    figures = {"mean": (low + high) / 2, "low": low, "high": high}
    figures |= {"questions": 4, "by_seed": {"0": (low + high) / 2}}
    return {"greedy": figures, "sampled": figures}


def met(em: dict[str, Any], apart: float, refits: int = 0) -> dict[str, bool]:
    difference = {"supervised": between(apart, apart)}
    found = reached(em, difference, [{**WELL, "refits": 0}, {**WELL, "refits": refits}])
    return {
        name: goal.met(value) for name, goal in GOALS.items() if (value := found[name]) is not None
    }


def test_intervals_that_touch_overlap() -> None:
    em = {"trained": between(0.5, 0.6), "no_search": between(0.1, 0.4999), "rag": between(0.4, 0.5)}
    em |= {f"{name}_trained": of for name, of in em.items() if name != "trained"}
    assert met(em, 0.0) == {
        "over_no_search_greedy": True,
        "over_no_search_sampled": True,
        "over_rag_greedy": False,
        "over_rag_sampled": False,
        "over_no_search_trained_greedy": True,
        "over_no_search_trained_sampled": True,
        "over_rag_trained_greedy": False,
        "over_rag_trained_sampled": False,
        "minus_supervised_sampled": True,
        **dict.fromkeys(WELL, True),
    }
    assert not met(em, -0.0001)["minus_supervised_sampled"]
    assert not met(em, 0.0, refits=1)["refits"]


def test_unlike_questions_have_no_verdict() -> None:
    em = dict.fromkeys(NAMES, between(0.1, 0.2)) | {"trained": between(0.5, 0.6)}
    more, other = between(0.1, 0.2), between(0.1, 0.2)
    for of in more.values():  # of a seed whose trained model is not there yet
        of |= {"questions": 8, "by_seed": {"0": 0.1, "1": 0.1}}
    for of in other.values():
        of["by_seed"] = {"1": 0.1}
    found = reached(em | {"rag": more, "no_search": other}, {"supervised": between(0, 0)}, [])
    assert {name for name, value in found.items() if value is None} == {
        *(f"over_{name}_{how}" for name in ("rag", "no_search") for how in ("greedy", "sampled")),
        *WELL,
    }


def test_what_is_not_there_yet_is_none() -> None:
    nothing = {"greedy": None, "sampled": None}
    em = dict.fromkeys(NAMES, nothing) | {"trained": between(0.5, 0.6)}
    assert {*reached(em, {"supervised": nothing}, []).values()} == {None}

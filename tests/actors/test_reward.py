"""Exact match against the outputs of Search-R1's own functions."""

import json
from pathlib import Path

import pytest

from actors.reward import exact_match, normalize_answer

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "reward.json").read_text())


@pytest.mark.parametrize("case", VECTORS["normalize"], ids=lambda case: repr(case["input"]))
def test_normalisation_is_search_r1s(case: dict[str, str]) -> None:
    assert normalize_answer(case["input"]) == case["output"]


@pytest.mark.parametrize("case", VECTORS["em"], ids=lambda case: repr(case["prediction"]))
def test_exact_match_is_search_r1s(case: dict[str, object]) -> None:
    assert exact_match(case["prediction"], case["golden"]) == case["output"]


@pytest.mark.parametrize(
    ("prediction", "gold", "reward"),
    [("1 000", ["1000"], 0), ("x", [], 0), ("b", ["a", "B."], 1), ("don’t", ["don't"], 0)],
)
def test_cases_from_the_field(prediction: str, gold: list[str], reward: float) -> None:
    assert exact_match(prediction, gold) == reward

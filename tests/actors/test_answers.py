"""Rewards against the outputs of the original functions, and against naive transcriptions."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.answers import exact_match, extract_answer, normalize_answer, substring_match, token_f1
from actors.rewards.search_r1 import format_fault, score_em, score_format
from configs.runtime.process import REPOSITORY

VECTORS = json.loads((REPOSITORY / "tests" / "vectors" / "reward.json").read_text())


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


@pytest.mark.parametrize("case", VECTORS["subem"], ids=lambda case: repr(case["prediction"]))
def test_substring_match_is_search_r1s(case: dict[str, object]) -> None:
    assert substring_match(case["prediction"], case["golden"]) == case["output"]


@pytest.mark.parametrize("case", VECTORS["f1"], ids=lambda case: repr(case["prediction"]))
def test_f1_is_recalls(case: dict[str, object]) -> None:
    assert token_f1(case["prediction"], case["gold"]) == case["recall_counter_f1"]


def test_f1_counts_words_and_takes_the_best_answer() -> None:
    assert token_f1("Barack Barack Obama", "Barack Obama") == pytest.approx(0.8)
    assert token_f1("river Po", ["Rhine", "the Po"]) == pytest.approx(2 / 3)
    assert token_f1("x", []) == 0.0


@pytest.mark.parametrize("case", VECTORS["extract"], ids=lambda case: case["input"][-30:])
def test_the_answer_is_read_as_each_mode_reads_it(case: dict[str, str]) -> None:
    assert extract_answer(case["input"], "search_r1") == case["search_r1"]
    assert extract_answer(case["input"]) == case["verl_like"]


@pytest.mark.parametrize("case", VECTORS["score_em"], ids=lambda case: case["solution"][-30:])
def test_the_score_of_v02_is_search_r1s(case: dict[str, object]) -> None:
    text, gold = case["solution"], case["target"]
    assert score_em(text, gold) == case["search_r1"]
    assert score_em(text, gold, format_score=0.1) == case["search_r1_format_score_0_1"]


@pytest.mark.parametrize("case", VECTORS["format_valid"], ids=lambda case: case["reason"])
def test_the_format_is_judged_as_in_v03(case: dict[str, object]) -> None:
    fault = format_fault(case["input"])
    assert fault == ("" if case["valid"] else case["reason"])


@pytest.mark.parametrize("case", VECTORS["format_score"], ids=lambda case: case["note"])
def test_the_score_of_v03_is_search_r1s(case: dict[str, object]) -> None:
    asked = case["kwargs"]
    score = score_format(
        case["solution"],
        case["target"],
        structure=asked["structure_format_score"],
        final=asked["final_format_score"],
        retrieval=asked["retrieval_score"],
    )
    assert score == case["output"]


_TAGS = [
    f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in "/ "
]
_pieces = st.lists(
    st.sampled_from([tag.replace(" ", "") for tag in _TAGS] + [" ", "x"]), max_size=14
)
_VALID = re.compile(
    r"(<think>T</think><search>T</search><information>T</information>)*"
    r"<think>T</think><answer>T</answer>".replace("T", "[^<]*").replace("><", r">\s*<")
)


@given(_pieces)
def test_the_automaton_accepts_what_its_regular_expression_does(pieces: list[str]) -> None:
    text = "".join(pieces)
    valid = not format_fault(f"<|im_start|>assistant\n{text}")
    assert valid == bool(_VALID.fullmatch(text.strip()))


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x"])))
def test_a_valid_text_stays_valid_behind_a_search(pieces: list[str]) -> None:
    text = "".join(pieces)
    before = "<|im_start|>assistant\n"
    turn = "<think>t</think><search>q</search><information>d</information>"
    assert (not format_fault(before + text)) <= (not format_fault(before + turn + text))


@given(st.text(), st.text())
def test_any_text_is_scored(prediction: str, gold: str) -> None:
    exact, inside, f1 = (f(prediction, gold) for f in (exact_match, substring_match, token_f1))
    assert exact <= inside and 0.0 <= f1 <= 1.0
    assert not exact or f1 == 1.0 or not normalize_answer(gold)
    assert token_f1(gold, prediction) == f1

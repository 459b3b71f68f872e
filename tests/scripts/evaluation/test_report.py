"""Figures against counting by hand and naive transcriptions, and the tables that show them."""

import re
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from scripts.evaluation.report import (
    MACRO,
    MICRO,
    figures_of,
    ks_of,
    pass_at_k,
    percentile,
)
from scripts.evaluation.rows import Asked, Row, asked_of, failed_row
from scripts.evaluation.tables import details_table, scores_table
from tests.scripts.evaluation.cases import BY_ID, SETS, row

# Of each set, what the samples of its questions were answered with; None: not at all.
ANSWERS = {
    "nq": [["answer 0", "x"], ["no", "answer 1"], [None, None], ["an answer 3 perhaps", None]],
    "hotpot": [["answer 0", "answer 0"], ["FAIL", "answer 1"]],
}


def rows_of(environment: str, samples: int) -> dict[Asked, Row]:
    rows: dict[Asked, Row] = {}
    for asked in asked_of(SETS, [environment], samples)[environment]:
        answer = ANSWERS[asked.set][int(asked.id[-1])][asked.sample]
        rows[asked] = row(asked, answer)
        if answer == "FAIL":
            rows[asked] = failed_row(asked, BY_ID[asked.set, asked.id], "RetrievalTimeout: slow", 3)
    return rows


def figures(samples: int = 2) -> dict[str, Any]:
    return figures_of(SETS, ["rag"], samples, rows_of("rag", samples))["rag"]


def mean(figures: dict[str, Any], metric: str) -> float:
    return float(figures["scores"][metric]["mean"])


def test_every_row_counts() -> None:
    nq, hotpot = figures()["nq"], figures()["hotpot"]
    counts = ("questions", "rows", "answered", "no_answer", "failed")
    assert [nq[name] for name in counts] == [4, 8, 5, 3, 0]
    assert [hotpot[name] for name in counts] == [2, 4, 3, 0, 1]
    assert hotpot["failures"] == {"RetrievalTimeout": 1}
    assert nq["stops"] == {"answered": 5, "turn_limit": 3}


def test_a_failed_row_is_wrong_and_a_question_the_mean_of_its_samples() -> None:
    assert mean(figures()["hotpot"], "em") == fmean([1.0, 0.5])
    assert mean(figures()["nq"], "em") == fmean([1.0, 0.5, 0.0, 0.0])
    assert mean(figures()["nq"], "substring") == fmean([1.0, 0.5, 0.0, 0.5])
    assert mean(figures()["nq"], "f1") == pytest.approx(fmean([1.0, 0.5, 0.0, 2 * 2 / 5 / 2]))


def test_pass_at_k_is_of_questions() -> None:
    assert mean(figures()["nq"], "pass@2") == fmean([1.0, 1.0, 0.0, 0.0])
    assert "pass@2" not in figures(1)["nq"]["scores"]
    assert [ks_of(n) for n in (1, 2, 5, 8)] == [[], [2], [2, 4, 5], [2, 4, 8]]


def test_averages_are_of_sets_and_of_questions() -> None:
    found = figures()
    em = [mean(found[name], "em") for name in ("nq", "hotpot")]
    assert mean(found[MACRO], "em") == fmean(em)
    assert mean(found[MICRO], "em") == pytest.approx((4 * em[0] + 2 * em[1]) / 6)
    assert found[MICRO]["rows"] == 12 and found[MICRO]["failed"] == 1
    assert found[MICRO]["em_by_hops"] == {"1": fmean([1, 1, 0, 1, 0, 0, 0, 0]), "2": 0.75}


def test_intervals_hold_the_means_and_are_the_same_again() -> None:
    assert figures() == figures()
    for each in figures().values():
        for score in each["scores"].values():
            assert score["low"] <= score["mean"] <= score["high"]
    em = figures()["nq"]["scores"]["em"]
    assert em["low"] < em["mean"] < em["high"]


def test_work_and_time_are_of_what_ended() -> None:
    hotpot = figures()["hotpot"]
    assert (hotpot["searches"], hotpot["turns"], hotpot["action_tokens"]) == (1.0, 2.0, 6.0)
    assert hotpot["timing"]["rollout_p50_s"] == 0.5 and hotpot["timing"]["search_p99_s"] == 0.25


def test_one_set_has_no_averages() -> None:
    assert list(figures_of(SETS[:1], ["rag"], 1, rows_of("rag", 1))["rag"]) == ["nq"]


def printed(samples: int, width: int = 180) -> str:
    rows = rows_of("search_r1", samples) | rows_of("rag", samples)
    report = {
        "name": "run-step-80",
        "temperature": float(samples > 1),
        "samples": samples,
        "methods": figures_of(SETS, ["search_r1", "rag"], samples, rows),
    }
    console = Console(width=width)
    with console.capture() as captured:
        console.print(scores_table(report), details_table(report), sep="\n")
    return captured.get()


def test_a_table_shows_methods_by_sets() -> None:
    lines = printed(1).splitlines()
    assert lines[0].strip() == "Exact match of run-step-80, greedy"
    (heads,) = (line for line in lines if "hotpot" in line and "nq" in line)
    assert MACRO in heads and MICRO in heads
    scores = next(line for line in lines if "search_r1" in line)
    assert ".250 ±.375" in scores and ".500 ±.500" in scores and ".333 ±" in scores


@pytest.mark.parametrize("samples", [1, 2])
def test_nothing_is_cut_in_80_columns(samples: int) -> None:
    text, wide = printed(samples, 80), printed(samples)
    words = {"method", "answered", "malformed", "p99 s", MACRO, MICRO, "[.000, .750]"}
    assert "…" not in text and not [word for word in words if word not in text]
    assert max(map(len, text.splitlines())) <= 80
    values = [set(re.findall(r"[\w.]+", each)) for each in (text, wide)]
    assert values[0] == values[1]


def test_a_table_says_what_failed_and_how_rollouts_ended() -> None:
    text = printed(2)
    assert "Exact match (Avg@2) of run-step-80, T = 1, 2 samples of each question" in text
    assert "they failed: search_r1 1, rag 1" in text and "pass@2" in text
    ends = "answered 8, turn_limit 3, failed by RetrievalTimeout 1, EM at 1 hops .375"
    assert f"search_r1: {ends}" in text


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(correct: int, k: int) -> None:
    samples = [True] * correct + [False] * (5 - correct)
    naive = fmean(any(subset) for subset in combinations(samples, k))
    assert pass_at_k(correct, 5, k) == pytest.approx(naive, abs=1e-12)


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_of_other_than_the_samples_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k = {k}"):
        pass_at_k(2, 5, k)


def test_percentiles() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([], 0.99) == 0.0

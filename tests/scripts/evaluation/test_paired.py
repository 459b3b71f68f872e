"""Two evaluations compared: the test against counting every outcome, the interval, the table."""

import random
from fractions import Fraction
from itertools import product
from statistics import fmean

import pytest
from rich.console import Console

from replay.trajectory import Question
from scripts.evaluation.paired import compared, p_of
from scripts.evaluation.report import MICRO
from scripts.evaluation.rows import Asked, QuestionSet, Row
from scripts.evaluation.tables import paired_table
from tests.scripts.evaluation.cases import SETS, row


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 1), (4, 4), (0, 9), (7, 3)])
def test_p_is_the_share_of_coins_as_lopsided(better: int, worse: int) -> None:
    coins, far = better + worse, abs(better - worse)
    tosses = [abs(2 * sum(toss) - coins) >= far for toss in product((0, 1), repeat=coins)]
    assert p_of(better, worse) == pytest.approx(float(Fraction(sum(tosses), len(tosses))))


def test_many_questions_do_not_overflow() -> None:
    assert p_of(26_000, 24_000) < 1e-15 and 0.9 < p_of(25_010, 24_990) < 0.95


def rows(right: dict[str, str], samples: int = 1) -> dict[Asked, Row]:
    """Of each set, which of its questions' samples are right: "10 11" are two of two samples."""
    found: dict[Asked, Row] = {}
    for each in SETS:
        for question, marks in zip(each.questions, right[each.name].split(), strict=False):
            for n, mark in enumerate(marks):
                asked = Asked("rag", each.name, question.id, n)
                found[asked] = row(asked, question.answers[0] if mark == "1" else "no")
    assert all(asked.sample < samples for asked in found)
    return found


def test_questions_are_compared_in_pairs() -> None:
    ours = rows({"nq": "1 1 1 0", "hotpot": "1 0"})
    theirs = rows({"nq": "0 1 0 1", "hotpot": "0"})  # its second question has no row there
    found = compared(SETS, ["rag"], 1, ours, theirs)["rag"]
    nq, hotpot, micro = found["nq"], found["hotpot"], found[MICRO]
    assert (nq["questions"], nq["better"], nq["worse"], nq["p"]) == (4, 2, 1, 1.0)
    assert (nq["em"]["here"], nq["em"]["there"], nq["em"]["difference"]) == (0.75, 0.5, 0.25)
    assert nq["em"]["low"] < 0.25 < nq["em"]["high"]
    assert (hotpot["questions"], hotpot["left_out"]) == (1, 1)
    assert (micro["questions"], micro["left_out"], micro["better"], micro["worse"]) == (5, 1, 3, 1)
    assert micro["em"]["difference"] == pytest.approx(2 / 5)
    assert compared(SETS, ["other"], 1, ours, theirs) == {}


def test_a_question_of_several_samples_is_their_mean() -> None:
    ours = rows({"nq": "11 10 00 11", "hotpot": "10 01"}, samples=2)
    theirs = rows({"nq": "10 01 00 00", "hotpot": "10 01"}, samples=2)
    nq = compared(SETS, ["rag"], 2, ours, theirs)["rag"]["nq"]
    assert (nq["better"], nq["worse"], nq["p"]) == (2, 0, 0.5)
    assert nq["em"]["difference"] == fmean([0.5, 0.0, 0.0, 1.0])


def test_pairs_tell_apart_what_means_alone_would_not() -> None:
    chance = random.Random(5)
    asked = tuple(Question(f"q-{n}", "?", ("a",)) for n in range(400))
    many = (QuestionSet("nq", SETS[0].path, asked),)
    ours, theirs = dict[Asked, Row](), dict[Asked, Row]()
    for n, question in enumerate(asked):
        key, right = Asked("rag", "nq", question.id, 0), chance.random() < 0.5
        theirs[key] = _row(key, right and n % 10 != 0)
        ours[key] = _row(key, right)
    nq = compared(many, ["rag"], 1, ours, theirs)["rag"]["nq"]
    assert nq["worse"] == 0 and nq["better"] > 5 and nq["p"] < 0.01
    assert 0.0 < nq["em"]["low"] < nq["em"]["difference"] < nq["em"]["high"] < 0.1


def _row(asked: Asked, right: bool) -> Row:
    told = {"set": asked.set, "id": asked.id, "environment": asked.environment, "sample": 0}
    return Row(**told, question="?", gold=("a",), em=float(right))


def test_the_table_shows_the_difference_and_what_else_differs() -> None:
    methods = compared(
        SETS,
        ["rag"],
        1,
        rows({"nq": "1 1 1 0", "hotpot": "1 0"}),
        rows({"nq": "0 1 0 1", "hotpot": "0"}),
    )
    other = {"name": "step-0", "unlike": ["seed = 1 here, 2 there"], "methods": methods}
    console = Console(width=150, record=True)
    console.print(paired_table({"name": "step-80", "against": other}))
    text = console.export_text()
    assert "step-80 against step-0" in text and "better" in text
    (nq,) = [line for line in text.splitlines() if "nq" in line]
    assert "+0.250 [" in nq and ".750" in nq
    assert "without 1 questions that only one of them was asked" in text
    assert "they differ in more than weights: seed = 1 here, 2 there" in text

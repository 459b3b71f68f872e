"""Verdicts in a judge's replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rewards.judge import read_verdict


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("yes", 1.0),
        ("No.", 0.0),
        (" **Yes** \n", 1.0),
        ("True", 1.0),
        ("incorrect", 0.0),
        ("Yes, because nothing says no.", 1.0),
        ("No, but yes in part", 0.0),
        ("Yes. The accepted answer is no, and the answer is no.", 1.0),
        ("0.7", 0.7),
        ("1", 1.0),
        (".5", 0.5),
        ("1e-1", 0.1),
        ("0.5/1", 0.5),
        ("Score: 0.75", 0.75),
        ("The score is 0.9.", 0.9),
        ("Verdict: **no**", 0.0),
        ("Score: 0.2\nOn second thoughts.\nScore: 0.8", 0.8),
        ('{"score": 0.3, "reason": "yes and no"}', 0.3),
        ('```json\n{"verdict": "no"}\n```', 0.0),
        ('{"verdict": "no", "reason": "a score 1 would need more"}', 0.0),
        ('{"reason": "say \\"score\\": 1", "verdict": false, "score": 9}', 0.0),
        ('{"verdict": "no", "reason": "a score 1 would', 0.0),
        ("{'score': 1.0}", 1.0),
        ('{"score": 1}\nOn second thoughts.\n{"score": 0.5}', 0.5),
        ("Score: 1 out of 1", 1.0),
        ("Score: 0.5/1.0", 0.5),
        ("Score: 1 in my view", 1.0),
        ("They mean the same.\nYes", 1.0),
        ("<think>no, no … yes?\nno</think>\nYes", 1.0),
        ("thinking aloud: no</think>yes", 1.0),
    ],
)
def test_verdicts_are_read(reply: str, verdict: float) -> None:
    assert read_verdict(reply) == verdict


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I cannot say.",
        "Not sure",
        "yes or no",
        "yes/no",
        "maybe yes",
        "No one can tell",
        "8/10",
        "Score: 8/10",
        "1/10",
        "Score: 1 out of 10",
        "Score: 1 out of ten",
        "Rating: 1 of 5",
        "Rating: 0.5 in 10",
        "Score: 1/1.5",
        "1 of 5",
        "They differ.\n1 out of 10",
        '{"verdict": "unclear", "reason": "a score 1 would need more"}',
        '{"score": 8}',
        "80%",
        "1.5",
        "-0.2",
        "nan",
        "Score: 1,000",
        "1. The answer is",
        "The accepted answer is 1.",
        "The answer is not correct",
        "<think>yes",
        "correctly",
        "9" * 400,
    ],
)
def test_what_is_no_verdict_is_none(reply: str) -> None:
    assert read_verdict(reply) is None


@given(st.text() | st.text(alphabet="yesno01./% :*#<>\n", max_size=60))
def test_any_reply_is_a_number_from_0_to_1_or_nothing(reply: str) -> None:
    verdict = read_verdict(reply)
    assert verdict is None or 0.0 <= verdict <= 1.0


@pytest.mark.parametrize(
    "piece", [" ", "-", "*", "1", "score ", "score: ", '"score": ', "1 of ", "<think>", "\n", ".1"]
)
def test_a_huge_reply_is_read_in_a_moment(piece: str) -> None:
    assert read_verdict(piece * 100_000 + "?") is None

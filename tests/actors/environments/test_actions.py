"""Reading actions from the text of one turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.search_r1 import Answer, Malformed, SearchAction, parse_action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search> mayor of bore </search>", SearchAction("mayor of bore")),
        ("I think <answer>\n kelu \n</answer>", Answer("kelu")),
        ("<answer></answer>", Answer("")),
        ("<search>a</search><answer>b</answer>", SearchAction("a")),
        ("<answer>b</answer><search>a</search>", Answer("b")),
        ("<answer> <search> a </search>", SearchAction("a")),
        ("<answer><answer>x</answer>", Answer("<answer>x")),
        ("<search>  </search>", Malformed()),
        ("no tags", Malformed()),
        ("kelu </answer>", Malformed()),
        ("<answer> kelu", Malformed()),
        ("<search> kelu </answer>", Malformed()),
        ("<ANSWER>kelu</ANSWER>", Malformed()),
        ("<information><information>", Malformed()),
    ],
)
def test_the_first_closed_pair_counts(text: str, action: object) -> None:
    assert parse_action(text) == action


@given(st.text(alphabet=list("<>/ abserchnw")))
def test_text_without_a_closing_tag_is_malformed(text: str) -> None:
    closed = "</search>" in text or "</answer>" in text
    assert closed or parse_action(text) == Malformed()

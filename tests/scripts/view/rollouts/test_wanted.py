"""Lists of steps are read as people type them."""

import pytest

from scripts.view.rollouts.wanted import steps_of


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("", ()),
        ("7", ((7, 7),)),
        ("31-40,55", ((31, 40), (55, 55))),
        (" 31 – 40 ; "[:-3] + " , ", ((31, 40),)),
        ("60-", ((60, 10**15),)),
        ("-9,", ((0, 9),)),
        ("40-31", ((31, 40),)),
        ("0-,0-,7", ((0, 10**15),)),
        ("5,1-3,4,8", ((1, 5), (8, 8))),
    ],
)
def test_steps_and_spans(text: str, spans: tuple[tuple[int, int], ...]) -> None:
    assert steps_of(text) == spans


@pytest.mark.parametrize("text", ["-", "a", "1-2-3", "1.5", "9" * 16, "٣"])
def test_what_is_no_step_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="give steps and spans of steps, such as 31-40,55"):
        steps_of(text)

"""Title and text of a passage."""

import pytest

from retrieval_server.protocol import Passage


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Bore"\nthe mayor is kelu .', "Bore", "the mayor is kelu ."),
        ("Bore\nfirst\nsecond", "Bore", "first\nsecond"),
        ("only a line", "", "only a line"),
        ("Bore\n", "Bore", ""),
    ],
)
def test_first_line_is_the_title_if_another_follows(contents: str, title: str, text: str) -> None:
    passage = Passage("p", contents, 1.0)
    assert (passage.title, passage.text) == (title, text)

"""Names in texts: whole, the longest, as they are written."""

import pytest

from scripts.wiki import names
from scripts.wiki.names import Names
from tests.scripts.wiki.small import read_articles, read_countries

NAMES = Names(
    {"Guinea": ["GIN"], "Papua New Guinea": ["PNG"], "Gulf of Guinea": [], "U.S.": ["USA"]}
)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("River in Guinea", {"GIN"}),
        ("Bay of Papua New Guinea, Guinea", {"PNG", "GIN"}),
        ("Island in the Gulf of Guinea", set()),
        ("Guinea-Bissau and Guineas", set()),
        ("a guinea", set()),
        ("City in Texas, U.S.", {"USA"}),
        ("U.S. city", {"USA"}),
    ],
)
def test_the_longest_whole_name_counts(text: str, keys: set[str]) -> None:
    assert NAMES.keys(text) == keys


def test_countries_are_found_by_name_and_by_what_is_of_them() -> None:
    found = names.of_countries(read_countries())
    assert found.keys("Aolandan painter of Bolandville, South American") == {"CAX"}
    assert found.found("Boland is in Boland") == [("Boland", ("CBX",))] * 2


def test_articles_are_found_by_title() -> None:
    first, *_ = read_articles()
    assert names.of_articles([first]).keys(f"Who saw {first.title}?") == {first.id}

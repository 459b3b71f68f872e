"""Facts of countries: sentences, accepted spellings, and what is not asked for."""

import copy
import json

import pytest

from scripts.wiki import countries
from scripts.wiki.countries import PEOPLE, RELATIONS, Country, spellings, with_article
from tests.scripts.wiki.small import given_countries


def country(**changes: object) -> Country:
    """The first of the made-up countries, with other values."""
    row = copy.deepcopy(given_countries()[0]) | changes
    return countries.decode(json.dumps([row]).encode())[0]


def test_each_fact_is_a_sentence_of_a_passage() -> None:
    made = country()
    said = "\n".join(contents for _, contents in made.passages)
    assert set(made.facts) == {*RELATIONS, PEOPLE}
    assert all(fact.sentence in said and fact.answers for fact in made.facts.values())
    assert "The currency of Aoland is the Aolandan dollar." in said
    assert "The official name of Aoland is the Republic of Aoland." in said
    assert [id for id, _ in made.passages] == ["facts-CAX-1", "facts-CAX-2"]


def test_what_has_several_values_is_told_and_not_asked() -> None:
    made = country(languages={"a": "Bo", "b": "Ke", "c": "Ra"}, tld=[".a", ".b", ".中"])
    told = made.facts["official language"]
    assert told.sentence == "The official languages of Aoland are Bo, Ke and Ra."
    assert told.answers == () == made.facts["internet domain"].answers


def test_what_is_not_independent_has_no_facts() -> None:
    made = country(independent=False)
    assert not made.facts and not made.adjectives and made.names == ("Aoland",)


def test_answers_hold_other_spellings() -> None:
    assert country().answers == ("Aoland", "Republic of Aoland", "Land of Aoland")
    assert spellings("Bogotá") == ("Bogotá", "Bogota")
    money = country(currencies={"PEN": {"name": "Peruvian sol"}}).facts["currency"]
    assert money.answers == ("Peruvian sol", "sol")
    assert country().facts["calling code"].answers == ("+90", "90")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Peru", "Peru"),
        ("Netherlands", "the Netherlands"),
        ("Dominican Republic", "the Dominican Republic"),
        ("Dominica", "Dominica"),
    ],
)
def test_names_take_their_article(name: str, said: str) -> None:
    assert with_article(name) == said

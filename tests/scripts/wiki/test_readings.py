"""What descriptions say plainly is read, and nothing else."""

import pytest

from scripts.wiki import articles, names, readings
from scripts.wiki.articles import Article
from tests.scripts.wiki.small import read_countries

COUNTRIES = {country.code: country for country in read_countries()}
NATIONS = names.of_countries(COUNTRIES.values())


def described(text: str, title: str = "Bo Ke", topic: str = "People") -> Article:
    return articles.article(0, title, text, f"{title} was somebody.", topic)


@pytest.mark.parametrize(
    ("text", "born", "died", "country"),
    [
        ("Aolandan poet (1832–1923)", 1832, 1923, "CAX"),
        ("Aolandan Romantic poet (born 1950)", 1950, 0, "CAX"),
        ("17th-century Bolandan poet (1632–1690)", 1632, 1690, "CBX"),
        ("Aolandan-Bolandan poet (1832–1923)", 1832, 1923, ""),
        ("Aoland-born Bolandan poet (1832–1923)", 1832, 1923, ""),
        ("Ancient Aolandan poet (132–190)", 132, 190, ""),
        ("Poet of Aoland (1832–1923)", 1832, 1923, ""),
    ],
)
def test_people(text: str, born: int, died: int, country: str) -> None:
    found = readings.person(described(text), NATIONS)
    assert found and (found.born, found.died, found.country) == (born, died, country)


@pytest.mark.parametrize(
    "text",
    [
        "Aolandan poet",
        "Aolandan poet (c. 1832–1923)",
        "Aolandan dynasty (1232–1923)",
        "Aolandan television series (1963–2025)",
    ],
)
def test_nobody(text: str) -> None:
    assert readings.person(described(text), NATIONS) is None


def test_what_is_no_person_by_its_topic_needs_a_pronoun() -> None:
    assert readings.person(described("Aolandan war (1832–1853)", topic="History"), NATIONS) is None


@pytest.mark.parametrize(
    ("text", "country"),
    [
        ("City in Aoland", "CAX"),
        ("Largest city in Western Bo, Boland", "CBX"),
        ("River in Aoland and Boland", ""),
        ("Sea between Aoland and Colands", ""),
        ("Aolandan city", ""),
        ("Country in Africa", ""),
        ("Writer in Aoland", ""),
        ("Historical region of Aoland", ""),
    ],
)
def test_places(text: str, country: str) -> None:
    found = readings.place(described(text, topic="Geography"), NATIONS, COUNTRIES)
    assert (found.country if found else "") == country


@pytest.mark.parametrize(
    ("title", "text", "said"),
    [
        ("Dra", "1897 novel by Bo Ke", ("the novel Dra", "author", 1897, "published")),
        (
            "Dra (film)",
            "1960 film directed by Bo Ke",
            ("the film Dra", "director", 1960, "released"),
        ),
        ("Dra", "Painting by Bo Ke", ("Dra", "painter", 0, "painted")),
        ("Dra", "Play by Bo Ke written around 1600", ("the play Dra", "author", 0, "")),
        ("Dra", "1897 novel by Somebody Else", None),
        ("Dra", "1975 single by Bo Ke", None),
        ("Letters (Bo Ke)", "1897 book by Bo Ke", None),
        ("Symphony No. 9", "1824 symphony by Bo Ke", None),
    ],
)
def test_works(title: str, text: str, said: tuple[object, ...] | None) -> None:
    maker = described("Aolandan poet (1832–1923)")
    found = readings.work(described(text, title, "Arts"), {"Bo Ke": maker})
    assert (found and (found.prose, found.maker_is, found.year, found.happened)) == said

"""Each kind of question: its words, its answers, and that the corpus leads to them."""

import dataclasses

import pytest

from scripts.wiki import task
from scripts.wiki.articles import article
from scripts.wiki.one_hop import definitions
from scripts.wiki.questions import KINDS, Question, stands
from tests.scripts.wiki.small import world

WORLD = world()
ASKED = task.ask(WORLD, 0)


def about(kind: str, *words: str) -> Question:
    """The first question of a kind with these words."""
    return next(q for q in ASKED if q.kind == kind and all(word in q.text for word in words))


def test_every_kind_is_asked_and_stands_in_the_corpus() -> None:
    assert {question.kind for question in ASKED} == {*KINDS}
    assert all(stands(question, WORLD.passages) for question in ASKED)
    assert all(len(question.hops) == KINDS[question.kind] for question in ASKED)
    assert len({question.id for question in ASKED}) == len(ASKED)


def test_questions_and_answers_read_well() -> None:
    city, person, novel = (
        next(each.article.name for each in found)
        for found in (WORLD.places, WORLD.people, WORLD.works)
    )
    maker = WORLD.works[0].maker.name
    said = {(q.text, q.answers[0]) for q in ASKED}
    wanted = {
        (f"In which country is {city}?", "Aoland"),
        (f"What is the currency of the country where {city} is?", "Aolandan dollar"),
        (f"What was the nationality of {person}?", "Aolandan"),
        (f"In what year did {person} die?", "1660"),
        (f"What is the capital of the country that {person} was from?", "Aolandville"),
        (f"Who is the author of the novel {novel}?", maker),
        (f"In what year was the author of the novel {novel} born?", "1609"),
        (f"What was the nationality of the author of the novel {novel}?", "Aolandan"),
        ("What are people from Aoland called?", "Aolandan"),
        ("Which Aolandan painter lived from 1600 to 1660?", person),
    }
    assert not wanted - said


def test_who_was_born_first_is_named_first_about_as_often_as_second() -> None:
    asked = [q for q in ASKED if q.kind == "older"]
    first = sum(q.text.startswith(f"Who was born first, {q.answers[0]} or") for q in asked)
    assert len(asked) > 100 and 0.35 < first / len(asked) < 0.65


@pytest.mark.parametrize(
    ("extract", "asked"),
    [
        (
            "Bo is the largest city of a whole region.",
            "What is the largest city of a whole region?",
        ),
        (
            "A bo is a boat for two people in a hurry.",
            "What is described as a boat for two people in a hurry?",
        ),
        ("Bo is a boat.", None),
        ("Bo is the largest city of the region of Bolovia and its people.", None),
        ("Bo was the largest city of the region of Aoland.", None),
    ],
)
def test_a_definition_does_not_name_what_it_defines(extract: str, asked: str | None) -> None:
    made = list(definitions([article(0, "Bo", "Thing", extract, "Geography")]))
    assert [question.text for question in made] == ([asked] if asked else [])


def test_a_definition_with_a_word_of_the_title_is_left_out() -> None:
    said = "Bo migration is the seasonal movement of animals that migrate far away."
    assert not list(definitions([article(0, "Bo migration", "", said, "Biology")]))


def test_a_question_whose_fact_is_gone_does_not_stand() -> None:
    question = about("origin_fact", "currency")
    passages = dict(WORLD.passages)
    for id in question.support:
        assert not stands(question, passages | {id: "Nothing\nNothing is known."})
    late = f"Late\n{'word ' * 70}{passages[question.support[0]]}"
    assert not stands(question, passages | {question.support[0]: late})


def test_a_question_that_gives_its_answer_away_does_not_stand() -> None:
    question = about("country", "capital")
    told = dataclasses.replace(question, text=f"Is it {question.answers[0]}?")
    assert not stands(told, WORLD.passages)
    bridge = about("origin_fact", "currency")
    told = dataclasses.replace(bridge, text=f"{bridge.text} ({bridge.hops[0].finds[0]})")
    assert not stands(told, WORLD.passages)

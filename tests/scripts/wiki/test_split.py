"""What is held out is nowhere in training: no country, no article, no name of either."""

from collections import Counter

import pytest

from scripts.wiki import task
from scripts.wiki.questions import Question
from scripts.wiki.split import EVAL, HELD_OUT, TRAIN, VALIDATION, Sides, split
from tests.scripts.wiki.small import world

WORLD = world()
ASKED = task.ask(WORLD, 0)
ARTICLES = {article.id: article.name for article in WORLD.articles}
NAMES = ARTICLES | {country.code: country.name for country in WORLD.countries}


@pytest.fixture(scope="module", params=[0, 1])
def sides(request: pytest.FixtureRequest) -> Sides:
    return split(ASKED, WORLD.entities, request.param)


def entities(questions: list[Question]) -> set[str]:
    """The articles and countries that questions need."""
    return {each for question in questions for each in question.about}


def test_no_entity_of_a_held_out_question_is_in_training(sides: Sides) -> None:
    held_out = entities(sides[EVAL])
    assert held_out and not held_out & entities(sides[TRAIN] + sides[VALIDATION])


def test_no_name_of_a_held_out_entity_is_in_a_training_question_or_answer(sides: Sides) -> None:
    text = "\n".join(f"{q.text} {' '.join(q.answers)}" for q in sides[TRAIN] + sides[VALIDATION])
    assert [NAMES[each] for each in entities(sides[EVAL]) if NAMES[each] in text] == []


def test_validation_asks_about_training_s_countries_and_other_articles(sides: Sides) -> None:
    validated, trained = entities(sides[VALIDATION]), entities(sides[TRAIN])
    assert not validated & trained & ARTICLES.keys()
    assert validated - ARTICLES.keys() <= trained
    assert sides[VALIDATION]


def test_a_question_is_on_one_side_once(sides: Sides) -> None:
    ids = [question.id for each in sides.values() for question in each]
    assert len(ids) == len(set(ids))


def test_the_held_out_share_is_about_what_is_wanted(sides: Sides) -> None:
    held_out = {each for each in entities(sides[EVAL]) if each not in ARTICLES}
    assert 0.5 * HELD_OUT < len(held_out) / len(WORLD.countries) <= HELD_OUT + 0.02


def test_the_same_seed_gives_the_same_split_and_another_seed_another() -> None:
    one, again, other = (split(ASKED, WORLD.entities, seed) for seed in (0, 0, 1))
    assert one == again and one != other


def test_any_beginning_is_a_fair_sample_of_the_kinds(sides: Sides) -> None:
    whole = sides[TRAIN]
    counts = (Counter(q.kind for q in each) for each in (whole, whole[: len(whole) // 4]))
    total, first = counts
    assert all(abs(first[kind] - count / 4) <= 2 for kind, count in total.items())

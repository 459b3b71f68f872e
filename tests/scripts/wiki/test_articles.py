"""Passages are whole sentences behind a description, of a bounded length."""

import pytest

from scripts.wiki.articles import WORDS, article, sentences

LONG = "The river is long and it runs far away to the sea. " * 20


def test_a_passage_is_a_description_and_as_many_whole_sentences_as_fit() -> None:
    made = article(7, "Bo", "River", LONG, "Geography")
    assert made.text.startswith("River. The river is long") and made.text.endswith("to the sea.")
    assert WORDS - 12 < len(made.text.split()) <= WORDS
    assert (made.id, made.contents.split("\n")[0]) == ("article-7", "Bo")
    assert made.extract.startswith("The river")


def test_one_endless_sentence_is_cut_at_a_word() -> None:
    made = article(0, "Bo", "River", "It goes on " + "and on " * 200, "Geography")
    assert len(made.text.split()) == WORDS + 1 and made.text.endswith(" …")


def test_gaps_are_closed_and_lines_joined() -> None:
    made = article(0, "Bo", "", "Bo  is a field  of\nnumbers .", "Mathematics")
    assert made.text == "Bo is a field of numbers."


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It is old. It is new.", 2),
        ("J. S. Bach wrote it.", 1),
        ("Mount St. Helens is high.", 1),
        ('It is called "old." Then it ended.', 2),
        ("About 3.26 light years. So far.", 2),
    ],
)
def test_sentences_do_not_end_with_initials(text: str, count: int) -> None:
    assert len(sentences(text)) == count


def test_a_name_is_a_title_without_its_qualifier() -> None:
    assert article(0, "Psycho (1960 film)", "", "x", "Arts").name == "Psycho"

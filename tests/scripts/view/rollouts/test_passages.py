"""Passages are told apart by the run's own template, and what is none is left as it is."""

import time

import pytest

from configs.schema import ActorsConfig
from scripts.view.rollouts.passages import Passages

SEARCH_R1 = ActorsConfig().passage_template


def told(text: str, template: str = SEARCH_R1, ids: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [(p["title"], p["id"], p["text"]) for p in Passages(template).pieces(text, ids)]


def test_each_has_its_title_and_its_id() -> None:
    text = (
        '\n\n<information>Doc 1(Title: "Anne (film)") Anne is.\nMore.\n'
        "Doc 2(Title: Bob (b) or C) Bob was.\nDoc 1(Title: D) of another query</information>\n\nhm"
    )
    assert told(text, ids=("1", "2", "3")) == [
        ("", "", "\n\n<information>"),
        ("Anne (film)", "1", "Anne is.\nMore.\n"),
        ("Bob (b) or C", "2", "Bob was.\n"),
        ("D", "3", "of another query"),
        ("", "", "</information>\n\nhm"),
    ]
    assert [id for _, id, _ in told(text, ids=("1", "2"))] == [""] * 5


def test_messages_of_a_chat_template_are_no_part_of_a_passage() -> None:
    text = (
        "<|im_start|>tool\nDoc 1(Title: A) a\n<|im_end|>\n<|im_start|>tool\n"
        "Doc 1(Title: B) b <|im_end|>"
    )
    assert [text for title, _, text in told(text) if title] == ["a", "b"]
    assert "".join(text for title, _, text in told(text) if not title).count("<|im_end|>") == 2


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (SEARCH_R1, "no passage"),
        (SEARCH_R1, "Doc 1(Title: ) without a title"),
        (SEARCH_R1, "Doc 3(Title: A) of no place"),
        (SEARCH_R1, "Doc 1(Title: A\nB) of two lines"),
        ("{title}{text} ", "Anna is"),
        ("{title} {text}", "Anna is"),
        ("[{rank}] {text}", "[1] Anna is"),
        ("{text} ({title})", "is (Anna)"),
        ("{title}: {text}", "Anna: is"),
        ("<{title}>{title}: {text}", "<A>A: is"),
        ("({title} {{text}}{text}", "Anna is"),
        ("}{title}: {text}", "}Anna: is"),
        (SEARCH_R1, f"Doc 1(Title: {'(ab)' * 200}) too long"),
    ],
)
def test_without_a_title_it_stays_as_it_is(template: str, text: str) -> None:
    assert told(text, template) == [("", "", text)]


def test_another_template_is_known() -> None:
    text = "# Anna\nis.\n# <script>\nwas."
    found = told(text, "\n# {title}\n{text}\n")
    assert found == [("Anna", "", "is.\n"), ("<script>", "", "was.")]
    found = told("[1] Anna | is\n[2] B | was", "[{rank}] {title} | {text}\n")
    assert [title for title, _, _ in found] == ["Anna", "B"]


def test_a_passage_cannot_make_up_others_nor_cost_time() -> None:
    assert len(told("Doc 1(Title: A) Doc 7(Title: B) x")) == 1
    forged = told("Doc 1(Title: A) Doc 2(Title: B) x\nDoc 2(Title: C) y", ids=("1", "2"))
    assert [id for title, id, _ in forged if title] == ["", ""]  # nobody knows which is which
    begun = time.process_time()
    told("Doc 1(Title: (" + "()" * 40_000)
    told("Doc 1(Title: (" * 7000)
    told("Doc 1(Title: A) " + "\n" * 100_000 + "x")
    told('[1] "' + "([1] " * 20_000, '[{rank}] "{title}" {text}')
    assert time.process_time() - begun < 2

"""The text of HTML pages, those among them that are meant to take forever."""

import random
import time

import pytest

from actors.environments.html_text import html_text


def test_the_main_part_stands_for_a_page_that_names_one() -> None:
    words = "kelu is the mayor of bore . " * 20
    main = f"<nav>Home</nav><main><header>skip</header><p>{words}</p></main><p>beside</p>"
    assert html_text(main) == ("", words.strip())
    plain = f"<nav>Home</nav><p>{words}</p><footer>(c)</footer>"
    assert html_text(plain) == ("", words.strip())
    assert html_text("<title>a</title><svg><title>b</title></svg><p>c") == ("a", "c")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("a<!-- <p>b --> c<!--> d", "a c d"),
        ("a<![x b", "a"),
        ("a<![CDATA[b]]> c<?php d ?> e</ f> g", "a c e g"),
        ("a <b title='x > y' alt=\"it's >\">c</b>", "a c"),
        ('a <b title=">c</b> d', "a c d"),
        ("1 < 2 &amp; 3 &lt; 4", "1 < 2 & 3 < 4"),
        ("a<script>if (b < c) { '</p>' }</SCRIPT >d", "a\nd"),
        ("a<script>b", "a"),
        ("a<textarea><p>b</textarea>", "a\n<p>b"),
        ("a<p class=b", "a"),
        ("a</p></template>b<svg/>c", "a\nb\nc"),
        (f"&#{'1' * 5000};", f"&#{'1' * 5000};"),
    ],
)
def test_markup_is_left_out(page: str, text: str) -> None:
    assert html_text(page) == ("", text)


@pytest.mark.parametrize(
    "piece",
    [
        *("<a/", "<a ", "<a ='\"", "<a =  ", "<a b='", "=", "<", "</a", "&#1"),
        *("<!--", "<!", "<?", "<![x", "<script", "<style></style", "<title>"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("<svg>", "a<p>")),
    ],
)
def test_any_page_is_read_in_linear_time(piece: str) -> None:
    took = []
    for length in (50_000, 500_000):
        begun = time.process_time()
        html_text(f"<a{piece * (length // len(piece))}")
        html_text(piece * (length // len(piece)))
        took.append(time.process_time() - begun)
    assert took[1] < 40 * took[0] + 0.5


def test_any_text_is_read_without_a_fault() -> None:
    rng = random.Random(0)
    pieces = [*"<>/!?=\"'[&;\0 ax", "--", "script", "title", "</", "&#", "x1", "svg", "main"]
    for _ in range(3000):
        html_text("".join(rng.choices(pieces, k=rng.randrange(30))))

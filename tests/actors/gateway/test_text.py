"""The text of a completion while its tokens come."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.text import Text
from actors.prompt import Prompter

NOTHING = np.empty(0, np.int32)
WORDS = ["kelu", " bore", "<", "search", ">", "</search>", "é", "語", "\n\n", "<|im_end|>"]


def naive(prompter: Prompter, ids: list[int], stops: tuple[str, ...]) -> tuple[str, int]:
    """The text before the first stop, and how many tokens there are up to its end."""
    for count in range(1, len(ids) + 1):
        text = prompter.decode(ids[:count])
        found = [text.find(stop) for stop in stops if stop in text]
        if found and not text.endswith("\ufffd"):
            return text[: min(found)], count
    return prompter.decode(ids), len(ids)


@given(data=st.data())
def test_it_is_cut_behind_the_token_that_completes_a_stop(prompter: Prompter, data: Any) -> None:
    words = data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8))
    stops = tuple(data.draw(st.lists(st.sampled_from(["</search>", "\n", "h>", "語"]), max_size=2)))
    ids = prompter.text("".join(words)).tolist()
    text = Text(prompter.decode, NOTHING, stops, ())
    told, at = "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 4))
        text.put(ids[at : at + size])
        at += size
        assert text.whole.startswith(told)
        told = text.full[: text.certain]
    text.finish()
    assert (text.whole, text.kept) == naive(prompter, ids, stops)
    assert text.whole.startswith(told)


def test_the_end_token_has_no_text_unless_it_is_a_stop(prompter: Prompter) -> None:
    ids, end = prompter.text("kelu<|im_end|>").tolist(), prompter.end_token
    for stops, include, expected in (
        ((), False, "kelu"),
        (("<|im_end|>",), False, "kelu"),
        (("<|im_end|>",), True, "kelu<|im_end|>"),
    ):
        text = Text(prompter.decode, NOTHING, stops, {end}, include)
        text.put(ids)
        assert text.whole == expected and text.kept == len(ids)


def test_a_first_word_is_spaced_by_the_prompt(word_tokenizer: Any, prompter: Prompter) -> None:
    words = Prompter(word_tokenizer, prompter._questions, prompter._actors)
    text = Text(words.decode, words.text("what is"), (), ())
    text.put(words.text("the mayor").tolist())
    assert text.whole == " the mayor"

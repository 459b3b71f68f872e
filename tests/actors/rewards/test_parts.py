"""Each part by cases, and against random, nested, unclosed and huge texts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from actors.answers import extract_answer
from actors.environments.search_r1 import Answer, parse_action
from actors.rewards.parts import (
    OF_ANSWER,
    OF_TRANSCRIPT,
    avoidance,
    f1,
    in_form,
    retrieval_hit,
    search_cost,
    substring,
)
from actors.rewards.search_r1 import format_fault, whole_text
from actors.rewards.transcript import Stream, Transcript
from replay.trajectory import Question, Search, StopReason, Turn
from retrieval_server.protocol import Passage

THINK, SEARCH, ANSWER = "<think>t</think>", "<search>q</search>", "<answer>a</answer>"
TAGS = [
    f"<{slash}{name}>"
    for slash in ("", "/")
    for name in ("think", "search", "information", "answer", "tool_call")
]
SOUP = st.lists(st.sampled_from([*TAGS, " ", "x", "<", ">", "é", "\ud7ff"]), max_size=12).map(
    "".join
)


def turn_of(searches: int = 0, malformed: bool = False, **fields: float) -> Turn:
    """A turn of one token that made so many searches."""
    one = np.ones(1, np.int32)
    made = (Search("q", (), 0.0, "empty"),) * searches
    return Turn(one, np.zeros(1, np.float32), one, one[:0], made, malformed, **fields)


def stream_of(*texts: str, **changes: Any) -> Stream:
    """A sequence of these texts."""
    plain = {
        "prompt": "who?",
        "texts": texts,
        "observations": ("",) * len(texts),
        "turns": tuple(turn_of() for _ in texts),
    }
    return Stream(**(plain | changes))


def transcript_of(*texts: str, **changes: Any) -> Transcript:
    """A rollout of these texts, in one sequence, that was answered rightly."""
    names = ("prompt", "observations", "turns")
    own = {name: changes.pop(name) for name in names if name in changes}
    plain = {
        "question": Question("q-1", "who?", ("Kelu",)),
        "answer": "kelu",
        "stop_reason": StopReason.ANSWERED,
        "sequences": (stream_of(*texts, **own),),
        "passages": (),
    }
    return Transcript(**(plain | changes))


@pytest.mark.parametrize(
    ("answer", "golds", "value"),
    [
        ("Paris, France", ["Paris"], 1.0),
        ("Lyon", ["Paris", "Lyons"], 0.0),
        (None, ["Paris"], 0.0),
        ("Rome", ["The"], 0.0),  # nothing is left of "The": it is in everything
        ("a", ["The"], 1.0),
        ("", ["Paris"], 0.0),
    ],
)
def test_a_substring_must_hold_something(
    answer: str | None, golds: list[str], value: float
) -> None:
    assert substring(answer, golds) == value


def test_f1_counts_shared_words_and_nothing_without_an_answer() -> None:
    assert f1("Barack Barack Obama", ["Barack Obama"]) == pytest.approx(0.8)
    assert f1(None, ["Barack Obama"]) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        " the ",
        "I don't know",
        "Unknown.",
        "The answer is unknown.",
        "N/A",
        "none",
        "It cannot be determined from the documents.",
        "no information found",
        "I'm not sure",
        "Not enough information is available",
        "The documents do not say who it was",
        "can’t say",
        "There is no mention of the mayor.",
        "I was unable to find the answer",
        "Not specified",
    ],
)
def test_no_answer_and_evasive_ones_are_avoidance(answer: str | None) -> None:
    assert avoidance(answer, ["kelu"]) == -1.0


@pytest.mark.parametrize(
    "answer",
    ["Lyon", "no", "yes", "0", "Unknown Pleasures", "Nobody", "The Unknown Soldier", "x" * 9000],
)
def test_a_wrong_answer_is_no_avoidance(answer: str) -> None:
    assert avoidance(answer, ["kelu"]) == 0.0


def test_a_right_answer_is_never_evasive() -> None:
    assert avoidance("unknown", ["Unknown"]) == 0.0
    assert avoidance("I Don't Know How She Does It", ["i don't know how she does it"]) == 0.0
    assert avoidance("unknown", ["the"]) == -1.0


@pytest.mark.parametrize(
    ("last", "value"),
    [
        (" a </answer>\n", 1.0),
        ("</answer>", 1.0),
        (ANSWER, 0.0),
        (THINK + ANSWER, 0.0),
        (f"a</answer>{ANSWER}", 0.0),
        ("a</answer> so", 0.0),
        ("a", 0.0),
    ],
)
def test_an_answer_that_the_environment_opened_needs_no_thought(last: str, value: float) -> None:
    assert in_form(transcript_of(THINK + SEARCH, last, opened=True)) == value
    assert in_form(transcript_of(SEARCH, last, opened=True)) == 0.0


@pytest.mark.parametrize(
    "texts",
    [
        (THINK + ANSWER,),
        (f" {THINK}\n{ANSWER} \n",),
        (THINK + SEARCH, THINK + ANSWER),
        (THINK + SEARCH, f"{THINK}\n\n{SEARCH}\n", THINK + ANSWER),
        (f"{THINK}<tool_call>{{}}</tool_call><tool_call>{{}}</tool_call>", THINK + ANSWER),
        (f"{THINK}<calculator>1 + 1</calculator>", THINK + ANSWER),
        ("<think>1 < 2, <b>bold</b></think>" + ANSWER,),
    ],
)
def test_thought_and_action_then_thought_and_answer_is_in_form(texts: tuple[str, ...]) -> None:
    assert in_form(transcript_of(*texts)) == 1.0


@pytest.mark.parametrize(
    "texts",
    [
        ("",),
        (ANSWER,),
        (SEARCH, THINK + ANSWER),
        (THINK, ANSWER),
        (THINK + SEARCH,),
        (THINK + SEARCH, ANSWER),
        (THINK + ANSWER, THINK + ANSWER),
        (THINK + THINK + ANSWER,),
        (THINK + ANSWER + "x",),
        ("x" + THINK + ANSWER,),
        (THINK + "x" + ANSWER,),
        (THINK + SEARCH + "<information>i</information>" + THINK + ANSWER,),
        (THINK + SEARCH + "<tool_call>c</tool_call>", THINK + ANSWER),
        ("<think><think>t</think>" + ANSWER,),
        ("<think>t<answer>a</think></answer>",),
        ("<think>t" + ANSWER,),
        (THINK + "<answer>a",),
        (THINK + "<answer>a</ans", "wer>"),
        (THINK + "</answer>a<answer>",),
        (THINK + "<search>q</sea", "rch>", THINK + ANSWER),
        (THINK + "</>", THINK + ANSWER),
    ],
)
def test_everything_else_is_out_of_form(texts: tuple[str, ...]) -> None:
    assert in_form(transcript_of(*texts)) == 0.0


def test_a_thought_that_the_template_opens_is_one() -> None:
    asked = "<|im_start|>assistant\n<think>\n"
    rest = f"t</think>{ANSWER}"
    assert in_form(transcript_of(rest, prompt=asked)) == 1.0
    assert in_form(transcript_of(rest)) == in_form(transcript_of(ANSWER, prompt=asked)) == 0.0
    told = (f"<tool_response>d</tool_response>{asked}", "")
    both = (f"t</think>{SEARCH}", rest)
    assert in_form(transcript_of(*both, prompt=asked, observations=told)) == 1.0
    assert in_form(transcript_of(*both, prompt=asked)) == 0.0


def test_the_prompt_of_each_sequence_is_read_before_its_first_turn() -> None:
    """So a thought that it opens is one, and an earlier sequence's end opens none."""
    asked, rest = "<|im_start|>assistant\n<think>\n", f"t</think>{ANSWER}"
    first = stream_of(THINK + SEARCH)
    assert in_form(transcript_of(sequences=(first, stream_of(rest, prompt=asked)))) == 1.0
    assert in_form(transcript_of(sequences=(first, stream_of(rest)))) == 0.0
    open_ended = stream_of(THINK + SEARCH, observations=(asked,))
    assert in_form(transcript_of(sequences=(open_ended, stream_of(rest)))) == 0.0


def test_the_last_turn_is_that_which_ended_last() -> None:
    """As of one who asked a sub-agent on the way."""
    begun, ended = (turn_of(ended_at=at) for at in (1.0, 3.0))
    main = stream_of(THINK + SEARCH, THINK + ANSWER, turns=(begun, ended))
    for at, value in ((2.0, 1.0), (4.0, 0.0)):
        agent = stream_of(THINK + SEARCH, turns=(turn_of(ended_at=at),), name="2")
        assert in_form(transcript_of(sequences=(main, agent))) == value


def test_parts_are_of_all_sequences() -> None:
    turns = (turn_of(2, reward=0.5), turn_of(1, reward=0.25))
    several = tuple(stream_of(THINK + SEARCH, turns=(turn,)) for turn in turns)
    whole = transcript_of(sequences=(*several, stream_of(THINK + ANSWER, observations=("end",))))
    assert search_cost(whole) == -3.0 and in_form(whole) == 1.0
    assert OF_TRANSCRIPT["environment"](whole) == 0.75
    assert whole.texts == (THINK + SEARCH, THINK + SEARCH, THINK + ANSWER)
    assert whole.observations == ("", "", "end") and whole.turns[:2] == turns


def test_an_action_that_was_not_understood_is_out_of_form() -> None:
    turns = (turn_of(malformed=True), turn_of())
    texts = (f"{THINK}<guess>x</guess>", THINK + ANSWER)
    assert in_form(transcript_of(*texts)) == 1.0
    assert in_form(transcript_of(*texts, turns=turns)) == 0.0


OWN = [tag for tag in TAGS if "information" not in tag and "tool_call" not in tag]
OWN_SOUP = st.lists(st.sampled_from([*OWN, " ", "x"]), max_size=9).map("".join)
_TURNS = st.lists(st.just(THINK + SEARCH) | OWN_SOUP, max_size=3)


@given(_TURNS, st.just(THINK + ANSWER) | OWN_SOUP)
def test_the_form_is_v03s_where_the_policy_searches_once_a_turn(
    before: list[str], last: str
) -> None:
    said = [*before, last]
    assume(all(text.count("<search>") < 2 for text in said))
    whole = "<information>d</information>".join(said)
    valid = not format_fault(f"<|im_start|>assistant\n{whole}")
    assert in_form(transcript_of(*said)) == valid


@given(_TURNS, st.just(THINK + ANSWER) | OWN_SOUP, st.text(), SOUP)
def test_what_the_policy_did_not_write_changes_nothing(
    before: list[str], last: str, prompt: str, observation: str
) -> None:
    clean = transcript_of(*before, last)
    texts = clean.texts
    told = (f"{observation}</information>",) * len(texts)
    soiled = transcript_of(*texts, prompt=f"{prompt}\n:", observations=told)
    assert in_form(clean) == in_form(soiled)


def _naive_answer(text: str) -> str | None:
    found, position = None, 0
    while (begin := text.find("<answer>", position)) >= 0:
        if (end := text.find("</answer>", begin)) < 0:
            break
        found, position = text[begin + len("<answer>") : end].strip(), end + len("</answer>")
    return found


@given(SOUP)
def test_the_answer_is_what_a_naive_search_finds(text: str) -> None:
    assert extract_answer(text) == _naive_answer(text)


def test_an_answer_cut_anywhere_between_two_turns_is_none() -> None:
    text = "<answer>kelu</answer>"
    for cut in range(1, len(text)):
        parsed = parse_action(text[:cut]), parse_action(text[cut:])
        assert not any(isinstance(each, Answer) for each in parsed)


def test_a_passage_hits_by_its_title_or_its_text() -> None:
    passages = (Passage("1", '"Bore"\nIts mayor is KELU.', 1.0), Passage("2", "xanu", 1.0))
    hit = transcript_of(ANSWER, passages=passages)
    assert retrieval_hit(hit) == 1.0
    assert retrieval_hit(transcript_of(ANSWER, passages=passages[1:])) == 0.0
    assert retrieval_hit(transcript_of("<information>kelu</information>" + ANSWER)) == 0.0
    nothing_left = Question("q", "who?", ("The",))
    assert retrieval_hit(transcript_of(ANSWER, passages=passages, question=nothing_left)) == 0.0


def test_each_search_costs() -> None:
    assert search_cost(transcript_of(ANSWER)) == 0.0
    turns = (turn_of(2), turn_of(1), turn_of())
    assert search_cost(transcript_of(SEARCH, SEARCH, ANSWER, turns=turns)) == -3.0


@given(st.none() | st.text() | SOUP, st.lists(st.text(), max_size=3))
def test_every_part_of_any_answer_is_a_small_number(answer: str | None, golds: list[str]) -> None:
    values = {name: part(answer, golds) for name, part in OF_ANSWER.items()}
    assert values.pop("avoidance") in (-1.0, 0.0)
    assert all(0.0 <= value <= 1.0 for value in values.values())
    assert values["em"] <= values["substring"]


@given(st.lists(st.text() | SOUP, min_size=1, max_size=4), st.text() | SOUP)
def test_every_part_of_any_rollout_is_a_small_number(texts: list[str], passage: str) -> None:
    rolled = transcript_of(*texts, passages=(Passage("p", passage, 0.0),))
    values = {name: part(rolled) for name, part in OF_TRANSCRIPT.items()}
    assert values.pop("search_cost") == 0.0
    assert all(value in (0.0, 1.0) for value in values.values())


@pytest.mark.parametrize("piece", ["<think>", "<answer>", "</answer>", "the ", "no further ", "é"])
def test_huge_texts_are_read_in_a_moment(piece: str) -> None:
    huge = piece * 50_000
    passages = (Passage("p", huge, 0.0), Passage("e", "", 0.0))
    rolled = transcript_of(huge, ANSWER, passages=passages, answer=huge)
    assert all(part(rolled) == 0.0 for part in OF_TRANSCRIPT.values())
    assert OF_ANSWER["em"](huge, ["kelu"]) == OF_ANSWER["f1"](huge, ["kelu"]) == 0.0


def test_generation_is_cut_as_search_r1_cuts_it() -> None:
    said = ["<answer>a</answer> <search>q</search> b", "<answer>c</answer>d", "e"]
    text = whole_text("p", said, ["<1>", "<2>", ""])
    assert text == "p<answer>a</answer> <search>q</search><1><answer>c</answer><2>e"

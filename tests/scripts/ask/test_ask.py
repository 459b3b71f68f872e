"""Asking: what is told while it happens, what is shown of it, and what programs read."""

import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from rich.console import Console

from actors.environments.search_r1 import STOP_TAGS
from actors.errors import GenerationFailed
from replay.trajectory import Trajectory
from retrieval_server.protocol import Passage
from scripts.ask.stream import StreamDecoder, View
from scripts.ask.view import ACTION, ANSWER, THOUGHT, Lines, Tags, Terminal, clean
from tests.scripts.ask.asking import ANSWER as SAID
from tests.scripts.ask.asking import PASSAGES, SEARCH, Bytes, Finding, Saying, make_asker

QUESTION = "what is the mayor of bore?"
DIM, BOLD, CYAN, YELLOW, RED = "\x1b[2m", "\x1b[1m", "\x1b[36m", "\x1b[33m", "\x1b[1;31m"


class Diary(View):
    """What a view is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def said(self, text: str) -> None:
        if self.told and self.told[-1][0] == "said":
            text = self.told.pop()[1] + text
        self.told.append(("said", text))

    def finished(self) -> None:
        self.told.append(("finished", ""))

    def found(self, query: str, passages: Sequence[Passage]) -> None:
        self.told.append(("found", (query, [passage.id for passage in passages])))

    def read(self, text: str) -> None:
        self.told.append(("read", text))

    def answered(self, question: str, trajectory: Trajectory, passages: Iterable[Passage]) -> None:
        self.told.append(("answered", (question, trajectory.answer)))


@pytest.fixture
def console() -> Console:
    """A terminal of 60 columns that is recorded."""
    return Console(
        record=True, width=60, file=io.StringIO(), force_terminal=True, color_system="standard",
        highlight=False,
    )  # fmt: skip


async def shown(console: Console, *texts: str, **changes: Any) -> str:
    """What a question looks like, styles included."""
    await make_asker(Terminal(console, STOP_TAGS), *texts, **changes).ask(QUESTION)
    return console.export_text(styles=True)


async def test_everything_is_told_in_the_order_in_which_it_happens() -> None:
    diary = Diary()
    await make_asker(diary, SEARCH, "bore", SAID).ask(QUESTION)
    assert diary.told == [
        ("said", SEARCH), ("finished", ""), ("found", ("mayor of bore", ["p0", "p1"])),
        ("said", "bore"), ("finished", ""), ("read", "try again ."),
        ("said", SAID), ("finished", ""), ("answered", (QUESTION, "kelu")),
    ]  # fmt: skip


async def test_what_is_found_before_the_first_turn_is_told_first() -> None:
    diary = Diary()
    await make_asker(diary, SAID, environment="rag").ask(QUESTION)
    found, *rest = diary.told
    assert found == ("found", (QUESTION, ["p0", "p1"]))
    assert [what for what, _ in rest] == ["said", "finished", "answered"]


async def test_the_rollout_is_that_of_training() -> None:
    asker = make_asker(View(), SEARCH, SAID)
    trajectory = await asker.ask(QUESTION)
    assert isinstance(asker.policy, Saying)
    first, second = asker.policy.asked
    assert first == Bytes().encode(QUESTION) == trajectory.prompt_tokens.tolist()
    observation = trajectory.turns[0].observation_tokens.tolist()
    assert second == [*first, *Bytes().encode(SEARCH, False), *observation]
    assert (trajectory.kind, trajectory.sampling.temperature) == ("eval", 0.0)


async def test_nobody_is_warned_that_the_answer_is_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trajectory = await make_asker(View(), SAID).ask(QUESTION)
    assert (trajectory.reward, caplog.text) == (None, "")


async def test_what_is_told_of_one_question_says_nothing_of_the_next() -> None:
    diary = Diary()
    asker = make_asker(diary, "bore", SAID, SAID)
    for _ in range(2):
        await asker.ask(QUESTION)
    assert [what for what, _ in diary.told].count("read") == 1
    assert diary.told[-1] == ("answered", (QUESTION, "kelu"))


async def test_a_failure_passes_through_after_what_was_told() -> None:
    diary = Diary()
    asker = make_asker(diary, SAID)
    assert isinstance(asker.policy, Saying)
    asker.policy.error = GenerationFailed("cut off")
    with pytest.raises(GenerationFailed):
        await asker.ask(QUESTION)
    assert diary.told == [("said", SAID[: len(SAID) // 2]), ("finished", "")]


def test_a_character_is_told_when_it_is_whole() -> None:
    pieces: list[str] = []
    words = StreamDecoder(Bytes(), pieces.append)
    for token in Bytes().encode("né…a"):
        words.put(token)
    assert pieces == ["n", "é", "…", "a"]
    words.put(2 + 0xE2)  # the first byte of three
    words.end()
    assert pieces[4:] == ["\ufffd"]
    words.put(Bytes().encode("z")[1])
    assert pieces[5:] == ["z"]


def test_words_keep_the_spaces_between_them() -> None:
    class Spaced(Bytes):
        def decode(self, ids: Sequence[int], *_: Any, **__: Any) -> str:
            return " ".join(f"w{each}" for each in ids)

    pieces: list[str] = []
    words = StreamDecoder(Spaced(), pieces.append)
    for token in (5, 6, 7):
        words.put(token)
    assert pieces == ["w5", " w6", " w7"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_styles_are_the_same_however_the_text_is_cut(size: int) -> None:
    text = "a < b <think> x </think> <search> q </search> <answer> k </answer> <b> c <sear"
    tags, styles = Tags(["</search>", "</answer>"]), dict.fromkeys((THOUGHT, ACTION, ANSWER), "")
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    shown = [piece for each in pieces for piece in tags.feed(each)] + [tags.end()]
    for piece, style in shown:
        styles[style] += piece
    assert "".join(piece for piece, _ in shown) == text
    assert styles[ACTION] == "<search> q </search>"
    assert styles[ANSWER] == "<answer> k </answer>"


async def test_thoughts_are_dim_searches_coloured_and_the_answer_bold(console: Console) -> None:
    text = await shown(console, SEARCH, SAID)
    assert f"{DIM}<think>" in text and f"{CYAN}<search>" in text and f"{BOLD}<answer>" in text
    assert text.index("╭") > text.index("</search>")  # the panel follows what it was searched by
    assert f"{BOLD}Bore\x1b[0m" in text and "the mayor of bore is kelu ." in text
    assert "a passage without a title" in text
    *_, answer, numbers = text.rstrip().splitlines()
    assert answer == f"{BOLD}kelu\x1b[0m"
    assert numbers.startswith(f"{DIM}1 search, {len(SEARCH) + len(SAID)} tokens, ")


async def test_a_correction_and_an_answer_that_is_missing_are_shown(console: Console) -> None:
    text = await shown(console, "bore", "bore", "bore")
    assert f"{YELLOW}try again ." in text and "╭" not in text
    assert f"{RED}no answer (turn_limit)" in text


async def test_a_search_that_finds_nothing_is_shown(console: Console) -> None:
    assert "nothing found" in await shown(console, SEARCH, SAID, retriever=Finding([]))


async def test_what_a_terminal_would_obey_is_left_out(console: Console) -> None:
    evil = "\x1b]0;owned\x07\x9b31m\r\u202e\n[bold]x[/bold] :smile:"
    retriever = Finding([Passage("p", f'"{evil}"\n{evil}', 1.0)])
    texts = (f"{evil} {SEARCH}", "<answer> \x1b[2Jkelu </answer>")
    text = await shown(console, *texts, retriever=retriever)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # without our own styles
    assert not set("\x1b\x07\x9b\r\u202e") & set(plain)
    assert plain.count("[bold]x[/bold] :smile:") == 3
    assert clean("a\tb\n\x00c") == "a\tb\nc"


async def test_programs_read_a_line_of_json_for_each_question() -> None:
    out = io.StringIO()
    asker = make_asker(Lines(out, Bytes().decode), SEARCH, "bore", SAID, SAID)
    for _ in range(2):
        await asker.ask(QUESTION)
    first, second = map(json.loads, out.getvalue().splitlines())
    seconds = first.pop("seconds"), *(each.pop("seconds") for each in first["turns"][0]["searches"])
    assert all(isinstance(each, float) for each in seconds)
    search = {"query": "mayor of bore", "status": "ok", "passages": ["p0", "p1"]}
    observed = first["turns"][0].pop("observation")
    assert "<information>" in observed and "the mayor of bore is kelu ." in observed
    assert first == {
        "question": QUESTION,
        "answer": "kelu",
        "stop_reason": "answered",
        "turns": [
            {"text": SEARCH, "searches": [search], "malformed": False},
            {"text": "bore", "searches": [], "malformed": True, "observation": "try again ."},
            {"text": SAID, "searches": [], "malformed": False, "observation": ""},
        ],
        "passages": [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES],
        "searches": 1,
        "tokens": len(SEARCH + "bore" + SAID),
    }
    assert (second["answer"], second["passages"]) == ("kelu", [])

"""What the policy did in one turn, read from the text of the tokens it sampled in that turn alone.

Pure. Tag text in the prompt or in a passage never reaches this parser, so it is inert.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

SEARCH_END, ANSWER_END = "</search>", "</answer>"
STOP_TAGS = (SEARCH_END, ANSWER_END)


@dataclass(frozen=True, slots=True)
class Search:
    """A request for passages; `query` is stripped and not empty."""

    query: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A use of the tool of that name; `text`, for the tool, is stripped and not empty."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer, stripped; it may be empty, which is simply wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """No closed tag pair, or nothing in it: the policy's own fault."""


Action = Search | ToolUse | Answer | Malformed


def parse_action(text: str, tools: Sequence[str] = ()) -> Action:
    """The first closed action tag pair of one turn's own text, read as Search-R1 reads it; `tools`
    are tags too.
    """
    match = _pattern(tuple(tools)).search(text)
    if match is None:
        return Malformed()
    kind, content = match[1], match[2].strip()
    if kind == "answer":
        return Answer(content)
    if not content:
        return Malformed()
    return Search(content) if kind == "search" else ToolUse(kind, content)


def parse_opened_answer(text: str) -> Answer | Malformed:
    """The answer in a turn whose `<answer>` the environment has written: what stands before the
    first `</answer>`, or between it and an `<answer>` of the policy's own.
    """
    inside, closed, _ = text.partition(ANSWER_END)
    return Answer(inside.rpartition("<answer>")[2].strip()) if closed else Malformed()


def queries_of(content: str, most: int) -> list[str]:
    """A search's queries: one for each line that holds something, the first `most` of them; where
    one is allowed, the whole is it.
    """
    if most == 1:
        return [content]
    lines = (line.strip() for line in content.splitlines())
    return [line for line in lines if line][:most]


@cache
def _pattern(tools: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<({'|'.join(('search', 'answer', *tools))})>(.*?)</\1>", re.DOTALL)

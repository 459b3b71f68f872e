"""Actions are parsed from the tokens that the policy sampled in one turn alone, so tag text in the
prompt or in a passage is inert.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

SEARCH_END, ANSWER_END = "</search>", "</answer>"
STOP_TAGS = (SEARCH_END, ANSWER_END)


def stop_tags(tools: Iterable[str]) -> tuple[str, ...]:
    """Return the closing tags of all actions; `tools` are tags too."""
    return (*STOP_TAGS, *(f"</{name}>" for name in tools))


@dataclass(frozen=True, slots=True)
class SearchAction:
    """A request for passages; `query` is stripped and not empty."""

    query: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A use of the tool `name`; its argument `text` is stripped and not empty."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer, stripped; an empty one is simply wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """No closed tag pair, or nothing in it: the policy's own fault."""


Action = SearchAction | ToolUse | Answer | Malformed


def parse_action(text: str, tools: Sequence[str] = ()) -> Action:
    """Parse a turn's first closed tag pair, as Search-R1 does; names of `tools` are tags too."""
    match = _pattern(tuple(tools)).search(text)
    if match is None:
        return Malformed()
    kind, content = match[1], match[2].strip()
    if kind == "answer":
        return Answer(content)
    if not content:
        return Malformed()
    return SearchAction(content) if kind == "search" else ToolUse(kind, content)


def parse_opened_answer(text: str) -> Answer | Malformed:
    """Parse the answer of a turn whose `<answer>` the environment has written: the text before the
    first `</answer>`, or between it and an `<answer>` of the policy's own.
    """
    inside, closed, _ = text.partition(ANSWER_END)
    return Answer(inside.rpartition("<answer>")[2].strip()) if closed else Malformed()


def queries_of(content: str, most: int) -> list[str]:
    """Split a search into at most `most` queries, one a line; 1 leaves it whole."""
    if most == 1:
        return [content]
    lines = (line.strip() for line in content.splitlines())
    return [line for line in lines if line][:most]


@cache
def _pattern(tools: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<({'|'.join(('search', 'answer', *tools))})>(.*?)</\1>", re.DOTALL)

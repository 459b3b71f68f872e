"""What the policy did in one turn, read from the text of the tokens it sampled in that turn alone.

Pure. Tag text in the prompt or in a passage never reaches this parser, so it is inert.
"""

import re
from dataclasses import dataclass

SEARCH_END, ANSWER_END = "</search>", "</answer>"
STOP_TAGS = (SEARCH_END, ANSWER_END)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Search:
    """A request for passages; `query` is stripped and not empty."""

    query: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer, stripped; it may be empty, which is simply wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """No closed tag pair, or a search for nothing: the policy's own fault."""


Action = Search | Answer | Malformed


def parse_action(text: str) -> Action:
    """The first closed action tag pair of one turn's own text, read as Search-R1 reads it."""
    match = _ACTION.search(text)
    if match is None:
        return Malformed()
    content = match[2].strip()
    if match[1] == "answer":
        return Answer(content)
    return Search(content) if content else Malformed()

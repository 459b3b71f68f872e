"""The views of an asked question: a terminal, as the rollout goes, or a line of JSON.

Text of policies and passages is not trusted: what a terminal would obey is left out.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from replay.trajectory import Trajectory, Turn
from retrieval_server.protocol import Passage
from scripts.ask.stream import View
from scripts.command.terminal import clean

THOUGHT, ACTION, ANSWER, READ = "dim", "cyan", "bold", "yellow"
_TAG = re.compile(r"<(/?)(\w+)>")
_BEGUN = re.compile(r"</?\w{0,24}$")  # what may become a tag


class Tags:
    """Splits text that comes in pieces at the answer, and at tags that end in one of `stops`."""

    def __init__(self, stops: Collection[str]) -> None:
        self._actions = {*(tag.strip("</>") for tag in stops), "tool_call"}
        self._held, self._style = "", THOUGHT

    def feed(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield pieces with their styles, holding back the possible beginning of a tag."""
        self._held += text
        while match := _TAG.search(self._held):
            yield self._held[: match.start()], self._style
            closing, name = match.groups()
            opened = THOUGHT if closing else self._of(name)
            yield match[0], self._style if closing else opened
            self._held, self._style = self._held[match.end() :], opened
        begun = _BEGUN.search(self._held)
        end = begun.start() if begun else len(self._held)
        ready, self._held = self._held[:end], self._held[end:]
        yield ready, self._style

    def end(self) -> tuple[str, str]:
        """The text still held back; another text begins."""
        last = self._held, self._style
        self._held, self._style = "", THOUGHT
        return last

    def _of(self, name: str) -> str:
        if name == "answer":
            return ANSWER
        return ACTION if name in self._actions else THOUGHT


class Terminal(View):
    """Shows thoughts dim, searches in colour, passages in a panel, the answer bold."""

    def __init__(self, console: Console, stops: Collection[str]) -> None:
        self._console, self._tags = console, Tags(stops)
        self._silent = self._fresh = True  # nothing of this turn yet; nothing on this line

    def asked(self, question: str) -> None:
        """Show a question that nobody typed here."""
        self._line(Text(clean(question), "bold"))

    def said(self, text: str) -> None:
        """Show the text at once."""
        for piece, style in self._tags.feed(clean(text)):
            self._put(piece, style)

    def finished(self) -> None:
        """End the line."""
        self._put(*self._tags.end())
        if not self._fresh:
            self._line(Text())
        self._silent = True

    def found(self, query: str, passages: Sequence[Passage]) -> None:
        """Show them in a panel."""
        body: RenderableType = Text("nothing found")
        if passages:
            *others, last = map(_shown, passages)
            body = Group(*(Padding(other, (0, 0, 1, 0)) for other in others), last)
        title = Text(clean(query) or " ", ACTION)
        self._console.print(Panel(body, title=title, title_align="left", border_style=ACTION))

    def read(self, text: str) -> None:
        """Show what is no passage."""
        self._line(Text(clean(text).strip(), READ))

    def answered(self, question: str, trajectory: Trajectory, passages: Iterable[Passage]) -> None:
        """End with the answer and the numbers."""
        if trajectory.answer is None:
            self._line(Text(f"no answer ({trajectory.stop_reason.value})", "bold red"))
        else:
            self._line(Text(clean(trajectory.answer) or "(an empty answer)", ANSWER))
        searches, tokens = trajectory.search_count, trajectory.action_count
        self._line(
            Text(
                f"{searches} search{'es' * (searches != 1)}, {tokens} tokens, "
                f"{trajectory.timings['total_s']:.1f} s",
                THOUGHT,
            )
        )

    def _put(self, text: str, style: str) -> None:
        text = text.lstrip() if self._silent else text
        if text:
            self._console.print(Text(text, style), end="", soft_wrap=True)
            self._silent, self._fresh = False, text.endswith("\n")

    def _line(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
        self._fresh = True


class Lines(View):
    """Writes a line of JSON when a question has been answered, or has failed."""

    def __init__(self, out: TextIO, decode: Callable[[Any], str]) -> None:
        self._out, self._decode = out, decode

    def answered(self, question: str, trajectory: Trajectory, passages: Iterable[Passage]) -> None:
        """Write the line."""
        record = {
            "question": question,
            "answer": trajectory.answer,
            "stop_reason": trajectory.stop_reason.value,
            "turns": [self._turn(turn) for turn in trajectory.turns],
            "passages": [{"id": p.id, "title": p.title, "text": p.text} for p in passages],
            "searches": trajectory.search_count,
            "tokens": trajectory.action_count,
            "seconds": round(trajectory.timings["total_s"], 3),
        }
        self._write(record)

    def failed(self, question: str, error: Exception) -> None:
        """Write the line."""
        self._write({"question": question, "error": f"{type(error).__name__}: {error}"})

    def _write(self, record: dict[str, Any]) -> None:
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()

    def _turn(self, turn: Turn) -> dict[str, Any]:
        return {
            "text": self._decode(turn.action_tokens),
            "searches": [
                {
                    "query": search.query,
                    "status": search.status,
                    "seconds": round(search.seconds, 3),
                    "passages": list(search.passage_ids),
                }
                for search in turn.searches
            ],
            "malformed": turn.malformed,
            "observation": self._decode(turn.observation_tokens),
        }


def _shown(passage: Passage) -> Text:
    title = clean(passage.title)
    return Text.assemble((f"{title}\n" if title else "", "bold"), clean(passage.text).strip())

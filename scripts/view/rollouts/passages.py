"""The passages in what a policy read, told apart by the template that the run showed them with."""

import re
from collections.abc import Sequence
from string import Formatter

MOST_TITLE, MOST_BRACKET = 300, 60  # characters
_FIELDS = {
    "rank": r"(?P<rank>[0-9]{1,4})",
    # What stands in brackets is taken whole: a title may hold the mark that ends it.
    "title": rf"(?P<title>(?>\([^()\n]{{0,{MOST_BRACKET}}}\)|[^\n]){{0,{MOST_TITLE}}}?)",
}
_END = re.compile(r"</[\w-]+>|<\|[^|<>\s]+\|>")  # of a block of passages


class Passages:
    """Tells the passages of one run's observations apart."""

    def __init__(self, template: str) -> None:
        """`template`: `actors.passage_template`."""
        self._head = _head(template)

    def pieces(self, text: str, ids: Sequence[str]) -> list[dict[str, str]]:
        """Cut a text into passages, each with its title, and what stands around them, without one.

        `ids`: of the passages as shown; a passage has its own only where there are as many, and
        nothing else looks like the beginning of one.
        """
        heads, are_all = self._heads(text)
        named = ids if are_all and len(ids) == len(heads) else [""] * len(heads)
        begins = [match.start() for match, _ in heads] + [len(text)]
        found = [_piece(text[: begins[0]])]
        for place, (match, rank) in enumerate(heads):
            last = place + 1 == len(heads) or heads[place + 1][1] <= rank
            end = begins[place + 1]
            if last and (over := _END.search(text, match.end(), end)):
                end = match.end() + len(text[match.end() : over.start()].rstrip())
            title = match["title"].strip().strip('"').strip()
            begin = match.end() if title else match.start()
            found.append(_piece(text[begin:end], title, named[place]))
            found.append(_piece(text[end : begins[place + 1]]))
        return [piece for piece in found if piece["text"].strip() or piece["title"]]

    def _heads(self, text: str) -> tuple[list[tuple[re.Match[str], int]], bool]:
        """Where passages begin, and whether that is all that looks so: the others do not follow on
        in number, or are too long.
        """
        found, last, passed_over = list[tuple[re.Match[str], int]](), 0, 0
        if self._head is None:
            return found, False
        for match in self._head.finditer(text):
            rank = int(match.groupdict().get("rank") or last + 1)
            if rank in (1, last + 1) and len(match["title"]) <= MOST_TITLE:
                found.append((match, rank))
                last = rank
            else:
                passed_over += 1
        return found, not passed_over


def _head(template: str) -> re.Pattern[str] | None:
    """What stands before a passage's text; None where that has no title, or no mark around it."""
    before, text, _ = template.partition("{text}")
    try:
        parts = [(mark, field) for mark, field, *_ in Formatter().parse(before.lstrip())]
    except ValueError:  # single brackets
        return None
    fields = [field for _, field in parts if field]
    marks = [mark.strip(" ") for mark, _ in parts]
    told = next((place for place, (_, field) in enumerate(parts) if field == "title"), -1)
    whole = text and len(fields) == len(set(fields)) and set(fields) <= set(_FIELDS)
    if not whole or told < 0 or not any(marks[: told + 1]) or not any(marks[told + 1 : told + 2]):
        return None
    return re.compile("".join(re.escape(m) + (_FIELDS[f] if f else "") for m, f in parts))


def _piece(text: str, title: str = "", id: str = "") -> dict[str, str]:
    return {"title": title, "id": id, "text": text}

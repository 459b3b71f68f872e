"""Which rollouts are asked for, and in which order, as parts of a statement of the index."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from learner.health.habits import LIMITS

SORTED_BY = (
    "number", "reward", "searches", "turns", "tokens", "malformed", "step", "staleness", "question",
    "stop",
)  # fmt: skip
DROPPED = "dropped: "  # how the fate of a rollout begins that was dropped, before the cause
WHICH = {
    "": "1",
    "repeated": "repeated > 0",
    "empty": "empty > 0",
    "malformed": "malformed > 0",
    "limit": f"stop IN ({', '.join(repr(each.value) for each in LIMITS)})",
    "dropped": f"fate = '{DROPPED}no_signal'",
}
MOST_SPANS = 1000  # of steps
_LAST = 10**15  # no step is beyond it
_STEPS = re.compile(r"([0-9]{0,15})(?:\s*([-–])\s*([0-9]{0,15}))?")
_IN_SPANS = (  # each span is looked up in the index of steps
    "rowid IN (SELECT each.rowid FROM {runs} AS of_run CROSS JOIN json_each(?) AS span "
    "CROSS JOIN rollouts AS each WHERE each.run = of_run.run AND each.step BETWEEN "
    "json_extract(span.value, '$[0]') AND json_extract(span.value, '$[1]'))"
)

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Wanted:
    """Which rollouts are asked for, and in which order."""

    run: int = -1  # all
    kind: str = ""
    stop: str = ""
    text: str = ""
    question: str = ""
    group: int = -1
    steps: Spans = ()  # trained in a step of one of these; none: all
    reward: tuple[float, float] | None = None
    searches: tuple[float, float] | None = None
    staleness: tuple[float, float] | None = None  # of one that was trained
    actor: str = ""
    times: tuple[float, float] | None = None  # under way in this span
    which: str = ""  # of WHICH
    sort: str = "number"
    descending: bool = True

    def condition(self, holding: Callable[[str], bytes]) -> tuple[str, list[Any]]:
        """The condition of a statement, and its values; `holding`: a byte for each text, 1 where
        the words stand in it. Raises ValueError.
        """
        if self.which not in WHICH:
            known = ", ".join(filter(None, WHICH))
            raise ValueError(f"which = {self.which[:40]!r}: choose one of {known}, or leave it out")
        parts, values = [WHICH[self.which]], list[Any]()
        for column, value, none in (
            ("run", self.run, -1), ("kind", self.kind, ""), ("stop", self.stop, ""),
            ("question_id", self.question, ""), ("group_id", self.group, -1),
            ("actor", self.actor, ""),
        ):  # fmt: skip
            if value != none:
                parts.append(f"{column} = ?")
                values.append(value)
        for column, span in (
            ("step", self.steps[0] if len(self.steps) == 1 else None), ("reward", self.reward),
            ("searches", self.searches), ("staleness", self.staleness),
        ):  # fmt: skip
            if span is not None:
                parts.append(f"{column} BETWEEN ? AND ?")
                values.extend(span)
        if len(self.steps) > 1:
            runs = "(SELECT DISTINCT run FROM rollouts)" if self.run < 0 else "(SELECT ? AS run)"
            parts.append(_IN_SPANS.format(runs=runs))
            values.extend([*([self.run] if self.run >= 0 else []), json.dumps(self.steps)])
        if self.times is not None:
            parts.append("at >= ? AND begun <= ?")
            values.extend(self.times)
        if self.text:
            parts.append("substr(?, rowid, 1) = x'01'")
            values.append(holding(self.text))
        return " AND ".join(parts), values

    def order(self, runs: int) -> str:
        """What a statement orders by; `runs`: how many there are. Records of several are told in
        the order in which they came.
        """
        way = "DESC" if self.descending else "ASC"
        sort = self.sort if self.sort in SORTED_BY else "number"
        if sort != "number":
            return f"{sort} {way} NULLS LAST, rowid DESC"
        return f"at {way}, rowid {way}" if runs > 1 and self.run < 0 else f"rowid {way}"


def steps_of(text: str) -> Spans:
    """The spans of a list of steps, such as `31-40,55`; `60-` is open. Raises ValueError."""
    parts = [part.strip() for part in text.split(",", MOST_SPANS + 1) if part.strip()]
    found = []
    for part in parts[:MOST_SPANS]:
        match = _STEPS.fullmatch(part)
        if match is None or not (match[1] or match[3]):
            raise ValueError(
                f"steps = {part[:40]!r}: give steps and spans of steps, such as 31-40,55"
            )
        first, last = int(match[1] or 0), int(match[3] or _LAST)
        last = last if match[2] else first
        found.append((min(first, last), max(first, last)))
    if len(parts) > MOST_SPANS:
        raise ValueError(f"steps: more than {MOST_SPANS} spans: ask for fewer")
    return _merged(found)


def _merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """The same steps, each in one span alone, in order."""
    found = list[tuple[int, int]]()
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)

"""Which rollouts are asked for, and in which order, as parts of a statement of the index."""

from dataclasses import dataclass
from typing import Any

SORTED_BY = (
    "number", "reward", "searches", "turns", "tokens", "malformed", "step", "staleness", "question",
    "stop",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """Which rollouts are asked for, and in which order."""

    run: int = -1  # all
    kind: str = ""
    stop: str = ""
    text: str = ""
    question: str = ""
    group: int = -1
    steps: tuple[int, int] | None = None  # trained in one of these
    reward: tuple[float, float] | None = None
    searches: tuple[float, float] | None = None
    staleness: tuple[float, float] | None = None  # of one that was trained
    actor: str = ""
    times: tuple[float, float] | None = None  # under way in this span
    sort: str = "number"
    descending: bool = True

    def condition(self) -> tuple[str, list[Any]]:
        """The condition of a statement, and its values."""
        parts, values = ["1"], list[Any]()
        for column, value, none in (
            ("run", self.run, -1), ("kind", self.kind, ""), ("stop", self.stop, ""),
            ("question_id", self.question, ""), ("group_id", self.group, -1),
            ("actor", self.actor, ""),
        ):  # fmt: skip
            if value != none:
                parts.append(f"{column} = ?")
                values.append(value)
        for column, span in (
            ("step", self.steps), ("reward", self.reward), ("searches", self.searches),
            ("staleness", self.staleness),
        ):  # fmt: skip
            if span is not None:
                parts.append(f"{column} BETWEEN ? AND ?")
                values.extend(span)
        if self.times is not None:
            parts.append("at >= ? AND begun <= ?")
            values.extend(self.times)
        if self.text:
            parts.append("instr(searched, ?)")
            values.append(self.text.lower())
        return " AND ".join(parts), values

    def order(self) -> str:
        """What a statement orders by."""
        way = "DESC" if self.descending else "ASC"
        sort = self.sort if self.sort in SORTED_BY else "number"
        return f"rowid {way}" if sort == "number" else f"{sort} {way} NULLS LAST, rowid DESC"

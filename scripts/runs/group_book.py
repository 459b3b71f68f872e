"""The groups of a run as its records have them: those that stand, and what became of the others.

A group that is settled is one number: a run of millions is audited in the memory of what stands.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from scripts.runs.record.facts import GroupOpened, Kind, Question, Summary

_FIRST: dict[Kind, int] = {"train": 1, "eval": 10**12}
_STANDS, _UNKNOWN, _ANSWERED, _DROPPED = 0, -1, -2, -3  # a positive fate: the step that trained it
_MOST_MISSING = 1 << 20  # openings that damage may have taken
_MOST_STEP = 1 << 62


@dataclass
class Group:
    """A group that stands, or was trained and is not committed.

    `rollouts`: by sibling, what its payloads hold; `granted`: the attempts under which each sibling
    was leased, by actor; `returned`: how often each came back.
    """

    group_id: int
    kind: Kind
    question: Question
    version: int
    evaluation: int
    size: int
    rollouts: dict[int, Summary] = field(default_factory=dict)
    compacted: set[int] = field(default_factory=set)
    granted: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    returned: Counter[int] = field(default_factory=Counter)
    reference: bytes | None = None  # of the first payload
    trained: int = 0

    @property
    def whole(self) -> bool:
        """True where every sibling was delivered."""
        return all(sibling in self.rollouts for sibling in range(self.size))

    @property
    def oldest_version(self) -> int:
        """The oldest version among the tokens that were delivered."""
        return min(each.oldest_version for each in self.rollouts.values())

    def lease(self, actor_id: str, sibling: int, attempt: int) -> str:
        """Note a lease; return what is wrong with its attempt."""
        self.granted.setdefault((actor_id, sibling), set()).add(attempt)
        least, most = self.attempts.get(sibling, 0), self.returned[sibling]
        self.attempts[sibling] = attempt
        if least <= attempt <= most:
            return ""
        return f"attempt {attempt}: {least} to {most} may have failed before"


class Groups:
    """Every group by id; `live` holds those that stand or are trained and not committed."""

    def __init__(self) -> None:
        self.live: dict[int, Group] = {}
        self.opened: Counter[Kind] = Counter()
        self.standing = 0  # train groups that are neither trained nor dropped
        self._fates: dict[Kind, array[int]] = {"train": array("q"), "eval": array("q")}
        self._strays: dict[int, int] = {}  # opened far out of their order
        self._causes: list[str] = []

    def open(self, fact: GroupOpened, size: int) -> Iterator[str]:
        """Take a group in; yield what is wrong with its id."""
        fates, group_id = self._fates[fact.kind], fact.group_id
        index = group_id - _FIRST[fact.kind]
        if self.place(group_id) is not None:
            yield f"group {group_id} was opened twice"
        elif index != len(fates):
            due = _FIRST[fact.kind] + len(fates)
            yield f"group {group_id} was opened, but {due} is the next {fact.kind} group"
        self.opened[fact.kind] += 1
        if 0 <= index - len(fates) <= _MOST_MISSING:
            fates.extend([_UNKNOWN] * (index - len(fates)))
            fates.append(_STANDS)
        else:
            self._settle(group_id, _STANDS)
        self.standing += fact.kind == "train"
        self.live[group_id] = Group(
            group_id, fact.kind, fact.question, fact.version, fact.evaluation, size
        )

    def place(self, group_id: int) -> str | None:
        """Say what became of a group: '' where it stands, None where it was never opened."""
        if group := self.live.get(group_id):
            if group.trained:
                return f"trained at step {group.trained}"
            return "answered" if group.kind == "eval" and group.whole else ""
        fate = self._fate(group_id)
        if fate is None or fate in (_STANDS, _UNKNOWN):
            return None
        if fate > 0:
            return f"trained at step {fate}"
        return "answered" if fate == _ANSWERED else f"dropped ({self._causes[_DROPPED - fate]})"

    def is_dropped(self, group_id: int) -> bool:
        """True where a group was dropped."""
        fate = self._fate(group_id)
        return fate is not None and fate <= _DROPPED

    def unfinished(self, kind: Kind) -> list[int]:
        """Return the groups of which something is still to come."""
        return [i for i, each in self.live.items() if each.kind == kind and not self.place(i)]

    def train(self, group: Group, step: int) -> None:
        """Note the step that trains a group."""
        self.standing -= not group.trained
        group.trained = step

    def drop(self, group_id: int, cause: str) -> Group | None:
        """Note that a group is dropped; return it if it stood."""
        if cause not in self._causes:
            self._causes.append(cause)
        self._settle(group_id, _DROPPED - self._causes.index(cause))
        group = self.live.pop(group_id, None)
        self.standing -= group is not None and group.kind == "train" and not group.trained
        return group

    def commit(self, group_id: int, step: int) -> None:
        """Note that the training of a group is durable."""
        self._settle(group_id, min(step, _MOST_STEP))
        self.live.pop(group_id, None)

    def end(self, evaluation: int) -> list[Group]:
        """Take away what an evaluation that is over has left, and return it."""
        found = [each for each in self.live.values() if each.evaluation == evaluation]
        found = [each for each in found if each.kind == "eval"]
        for group in found:
            self._settle(group.group_id, _ANSWERED)
            del self.live[group.group_id]
        return found

    def _fate(self, group_id: int) -> int | None:
        if group_id in self._strays:
            return self._strays[group_id]
        fates, index = self._slot(group_id)
        return fates[index] if 0 <= index < len(fates) else None

    def _settle(self, group_id: int, fate: int) -> None:
        fates, index = self._slot(group_id)
        if 0 <= index < len(fates):
            fates[index] = fate
        else:
            self._strays[group_id] = fate

    def _slot(self, group_id: int) -> tuple["array[int]", int]:
        kind: Kind = "eval" if group_id >= _FIRST["eval"] else "train"
        return self._fates[kind], group_id - _FIRST[kind]

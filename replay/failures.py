"""How often each question has failed since it was last answered, sibling by sibling.

Consumes failed attempts and answers; produces counts that decide when a question is given up. A
question asked by a training group and the same one asked by an evaluation count apart.
"""

from dataclasses import dataclass, field

from replay.groups import Group

# Given back for a restart of replay's, because no retrieval server was there, or it had too much to
# do or lets nobody in, or because a user's tool or environment failed: however often that happens,
# it says nothing about the question. (Where it does, the group's deadline counts it.)
NOBODYS_FAULT = (
    *("not_held", "absent", "RetrievalUnreachable", "RetrievalOverloaded", "RetrievalDenied"),
    *("ToolFailed", "EnvironmentFailed"),
)
Key = tuple[int, str]  # evaluation (-1: training), question id


@dataclass
class Failures:
    """`counts`: key → sibling → failed attempts."""

    counts: dict[Key, dict[int, int]] = field(default_factory=dict)

    def of(self, group: Group, sibling: int) -> int:
        """How often this sibling of the group's question has failed."""
        return self.counts.get(_key(group), {}).get(sibling, 0)

    def count(self, group: Group, sibling: int, cause: str = "") -> None:
        """One more failed attempt, unless nothing failed."""
        if cause.startswith(NOBODYS_FAULT):
            return
        siblings = self.counts.setdefault(_key(group), {})
        siblings[sibling] = siblings.get(sibling, 0) + 1

    def forgive(self, group: Group) -> None:
        """The group's question was answered, or given up."""
        self.counts.pop(_key(group), None)

    def forget(self, evaluation: int) -> None:
        """This evaluation never was."""
        self.counts = {key: n for key, n in self.counts.items() if key[0] != evaluation}


def _key(group: Group) -> Key:
    return group.evaluation, group.question.id

"""Failed attempts at each question since it was last answered; they decide when it is given up."""

from dataclasses import dataclass, field

from replay.groups import Group

# Given back for a restart of replay's, because no retrieval server was there, or it had too much to
# do or lets nobody in, or because a user's tool or environment failed: however often that happens,
# it says nothing about the question. (Where it does, the group's deadline counts it.)
NOBODYS_FAULT = (
    "not_held",
    "absent",
    "RetrievalUnreachable",
    "RetrievalOverloaded",
    "RetrievalDenied",
    "ToolFailed",
    "EnvironmentFailed",
)
FailureKey = tuple[int, str]  # evaluation (-1: training), question id


@dataclass
class Failures:
    """Failed attempts by question and sibling.

    A question counts apart for training and for each evaluation.
    """

    counts: dict[FailureKey, dict[int, int]] = field(default_factory=dict)

    def of(self, group: Group, sibling: int) -> int:
        """Return how often this sibling of the group's question has failed."""
        return self.counts.get(_key(group), {}).get(sibling, 0)

    def count(self, group: Group, sibling: int, cause: str = "") -> None:
        """Count a failed attempt, unless its cause is nobody's fault."""
        if cause.startswith(NOBODYS_FAULT):
            return
        siblings = self.counts.setdefault(_key(group), {})
        siblings[sibling] = siblings.get(sibling, 0) + 1

    def forgive(self, group: Group) -> None:
        """Forget the failures of a question that was answered, or given up."""
        self.counts.pop(_key(group), None)

    def forget(self, evaluation: int) -> None:
        """Forget the failures of an evaluation that is voided."""
        self.counts = {key: n for key, n in self.counts.items() if key[0] != evaluation}


def _key(group: Group) -> FailureKey:
    return group.evaluation, group.question.id

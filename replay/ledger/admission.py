"""Admission: which groups may be opened, which may be trained; the two rules bound staleness.

They bound the learner's step s (steps completed) less the version under which a group was opened,
which is never less than its staleness. With G groups per step, a group is opened only while fewer
than (max_staleness + v + 1)·G groups stand before it, v being the version that the requesting actor
has applied; and a batch may pass an unfinished older group only if every group left behind can
still be trained within its bound. Nothing is dropped for its age: an unfinished group that must
come first is waited for, until its deadline.
"""

from collections.abc import Collection, Sequence

import msgspec

Position = tuple[int, int]
"""(version, group id): the order in which groups are trained."""


class Bounds(msgspec.Struct, frozen=True):
    """The part of the configuration that both rules depend on."""

    groups_per_step: int
    max_staleness: int
    total_steps: int | None = None  # None: without end


class Choice(msgspec.Struct, frozen=True):
    """The batch that a learner at step s may take, or nothing and why.

    `oldest` is True when a batch could be filled but an unfinished older group must come first.
    """

    group_ids: tuple[int, ...]  # ascending; empty: wait
    oldest: bool = False


def allowed_groups(version: int, bounds: Bounds) -> int:
    """Return how many groups may be open, ready or sampled once an actor at `version` opened one.

    Never more than the run will train: nothing is rolled out for steps that will not come.
    """
    steps = bounds.max_staleness + version + 1
    if bounds.total_steps is not None:
        steps = min(steps, bounds.total_steps)
    return steps * bounds.groups_per_step


def can_open(admitted: int, version: int, bounds: Bounds) -> bool:
    """Return True if an actor that has applied `version` may open a group.

    `admitted`: the groups that are open, ready or sampled.
    """
    return admitted < allowed_groups(version, bounds)


def can_pass(left_behind: Collection[int], step: int, bounds: Bounds) -> bool:
    """Return True if a learner at `step` may leave groups of these versions behind its batch.

    For every j ≥ step, the groups of version ≤ j − max_staleness must fit the (j − step)·G places
    that come before step j is over. Places only grow with j, so each version is looked at once: at
    the first j at which the groups up to it count.
    """
    return all(
        count <= max(0, version + bounds.max_staleness - step) * bounds.groups_per_step
        for count, version in enumerate(sorted(left_behind), start=1)
    )


def choose_batch(
    ready: Sequence[Position], unfinished: Sequence[Position], step: int, bounds: Bounds
) -> Choice:
    """Choose the batch for a learner that has completed `step`: oldest version first."""
    if len(ready) < bounds.groups_per_step:
        return Choice(())
    in_order = sorted(ready)
    batch, rest = in_order[: bounds.groups_per_step], in_order[bounds.groups_per_step :]
    if not can_pass([version for version, _ in [*rest, *unfinished]], step, bounds):
        return Choice((), oldest=True)
    return Choice(tuple(sorted(group_id for _, group_id in batch)))

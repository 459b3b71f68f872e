"""Rollbacks: the learner takes up an older checkpoint again, at a lower rate, and goes on.

No step is counted back and no batch trained again: the weights of step `to` become those of `step`.
Nothing here imports torch.
"""

from collections.abc import Iterable, Sequence

import msgspec


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the checkpoint of step `to`, taken up at the end of `step`. `since`: first step
    of the window in which `rule` fired; `scale`: of the configured rates, from then on.
    """

    step: int
    since: int
    to: int
    rule: str
    scale: float


def good(saved: Iterable[int], made: Sequence[Rollback]) -> list[int]:
    """The saved steps whose weights no rollback has thrown away, in order."""
    return sorted(step for step in saved if not any(each.to < step < each.step for each in made))


def good_before(first: int, saved: Iterable[int], made: Sequence[Rollback]) -> list[int]:
    """The good steps before `first`, the newest first."""
    return [step for step in reversed(good(saved, made)) if step < first]


def needed(first: int, saved: Iterable[int], made: Sequence[Rollback]) -> list[int]:
    """The saved steps to keep for a rollback behind step `first` or a later one: the newest good
    one before it, and the next, which it may be once `first` has moved on.
    """
    steps = good(saved, made)
    return [*[step for step in steps if step < first][-1:], *[s for s in steps if s >= first][:1]]

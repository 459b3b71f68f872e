"""Every wait has a name: who waits for whom, for what, since when, at which version.

Consumes the books and the roster; produces one sentence. Pure.
"""

from replay.admission import Bounds, allowed_groups
from replay.books import Books
from replay.roster import Actor, Roster


def describe_batch_wait(books: Books, roster: Roster, step: int, oldest: bool, now: float) -> str:
    """Why the batch of `step` cannot be served yet."""
    blocking = min(books.opened.values(), key=lambda g: (g.version, g.group_id), default=None)
    if oldest and blocking:
        return f"step {step} must not pass an older one: {blocking.describe(now)}"
    have = f"step {step}: {len(books.ready)} of {books.config.groups_per_step} groups ready"
    if unscorable := books.tally.dropped["unscorable"]:
        have += f" ({unscorable} were unscorable so far: the actors' logs say why)"
    if blocking:
        return f"{have}; oldest unfinished: {blocking.describe(now)}"
    return f"{have}; none open: {describe_idleness(books, roster)}"


def describe_idleness(books: Books, roster: Roster) -> str:
    """Why no train group is open."""
    reasons = [_why_idle(books, actor) for actor in roster]
    return "; ".join(reasons) or "no actor has said hello"


def describe_evaluation(books: Books) -> str:
    """How far the first unfinished evaluation is; empty where there is none."""
    for evaluation in books.evaluations.values():
        if evaluation.result is None:
            done, total = evaluation.progress
            return f"evaluation of step {evaluation.step}: {done} of {total} rollouts"
    return ""


def describe_phase(books: Books, learner_waits_for: str) -> str:
    """What replay is doing or waiting for."""
    if books.stop_cause:
        return f"stopped: {books.stop_cause}"
    if books.incarnation == 0:
        return "waiting for a learner"
    if books.serving_again:
        return f"steps {books.served + 1} to {books.last_sampled} are trained again"
    if books.catching_up:
        return "the resumed learner's weights are not verified yet"
    return describe_evaluation(books) or learner_waits_for or f"learner trains step {books.served}"


def _why_idle(books: Books, actor: Actor) -> str:
    if actor.incarnation < 0:
        return f"{actor.actor_id} has not stated its weights"
    if actor.incarnation != books.incarnation:
        return (
            f"{actor.actor_id} has weights of incarnation {actor.incarnation}, "
            f"the learner's is {books.incarnation}"
        )
    free = actor.capacity - len(books.held.get(actor.actor_id, ()))
    if free < books.config.group_size:
        return (
            f"{actor.actor_id} has {free} of {actor.capacity} rollouts free, "
            f"a group needs {books.config.group_size}"
        )
    bounds = Bounds(books.config.groups_per_step, books.config.max_staleness)
    return (
        f"{actor.actor_id} has applied version {actor.version}, which admits "
        f"{allowed_groups(actor.version, bounds)} groups: {books.standing} stand already"
    )

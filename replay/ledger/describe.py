"""Sentences that name every wait: who waits for whom, for what, since when, at which version."""

from replay.ledger.admission import Bounds, allowed_groups
from replay.ledger.roster import Actor, Roster
from replay.ledger.state import LedgerState


def describe_batch_wait(
    state: LedgerState, roster: Roster, step: int, oldest: bool, now: float
) -> str:
    """Explain why the batch of `step` cannot be served yet."""
    if oldest and state.opened:
        blocking = min(state.opened.values(), key=lambda g: (g.version, g.group_id))
        return f"step {step} must not pass an older one: {blocking.describe(now)}"
    have = f"step {step}: {len(state.ready)} of {state.config.groups_per_step} groups ready"
    if unscorable := state.counters.dropped["unscorable"]:
        have += f" ({unscorable} were unscorable so far: the actors' logs say why)"
    if first := next(iter(state.opened.values()), None):  # of perhaps ten thousand
        return f"{have}; oldest unfinished: {first.describe(now)}"
    return f"{have}; none open: {describe_idleness(state, roster)}"


def describe_idleness(state: LedgerState, roster: Roster) -> str:
    """Explain why no train group is open."""
    reasons = [_why_idle(state, actor) for actor in roster]
    return "; ".join(reasons) or "no actor has said hello"


def describe_evaluation(state: LedgerState) -> str:
    """Say how far the first unfinished evaluation is; empty where there is none."""
    for evaluation in state.under_way.values():
        done, total = evaluation.progress
        return f"evaluation of step {evaluation.step}: {done} of {total} rollouts"
    return ""


def describe_phase(state: LedgerState, learner_waits_for: str) -> str:
    """Say what replay is doing or waiting for."""
    if state.stop_cause:
        return f"stopped: {state.stop_cause}"
    if state.incarnation == 0:
        return "waiting for a learner"
    if state.serving_again:
        return f"steps {state.served + 1} to {state.last_sampled} are trained again"
    if state.catching_up:
        return "the resumed learner's weights are not verified yet"
    return describe_evaluation(state) or learner_waits_for or f"learner trains step {state.served}"


def _why_idle(state: LedgerState, actor: Actor) -> str:
    if actor.incarnation < 0:
        return f"{actor.actor_id} has not stated its weights"
    if actor.incarnation != state.incarnation:
        return (
            f"{actor.actor_id} has weights of incarnation {actor.incarnation}, "
            f"the learner's is {state.incarnation}"
        )
    free = actor.capacity - len(state.held.get(actor.actor_id, ()))
    if free < state.config.group_size:
        return (
            f"{actor.actor_id} has {free} of {actor.capacity} rollouts free, "
            f"a group needs {state.config.group_size}"
        )
    bounds = Bounds(state.config.groups_per_step, state.config.max_staleness)
    return (
        f"{actor.actor_id} has applied version {actor.version}, which admits "
        f"{allowed_groups(actor.version, bounds)} groups: {state.admitted} stand already"
    )

"""What a message may say of this run: of its versions, steps, incarnations and leases.

Whoever holds a key may send any number. One that this run cannot have come to is refused by name,
before anything is folded: it would admit groups without end, or shut the true learner out for good.
"""

import replay.protocol as wire
from replay.ledger.events import PeerLost, Tick
from replay.ledger.state import LedgerState
from replay.log.summary import Summary

MOST_STARTS_UNHEARD = 10_000  # of a learner, that ended before it said Resume


def why_refused(state: LedgerState, message: wire.Decided | Tick | PeerLost) -> str:
    """Say why this cannot be said of the run; '' where it can."""
    match message:
        case wire.Ready():
            return _of_weights(state, message)
        case wire.Heartbeat() if message.ready is not None:
            return _of_weights(state, message.ready)
        case wire.Hello():
            return _of_leases(state, message)
        case wire.Deliver() if not state.was_opened(message.group_id):
            return f"group {message.group_id} was never opened"
        case wire.Deliver() if message.sibling >= (size := state.size_of(message.group_id)):
            return f"group {message.group_id} has no sibling {message.sibling}, only {size}"
        case wire.Resume():
            return _of_resumption(state, message)
        case wire.Evaluate() if message.step > state.served:
            return f"step {message.step} was never sampled: {state.served} was last"
        case wire.Report() if message.step > state.served + 1:
            return f"step {message.step} is not under way: {state.served} was the last sampled"
    return ""


def why_not_sampled(state: LedgerState, summary: Summary) -> str:
    """Say why no weights of this run can have sampled a trajectory; '' where they can."""
    oldest, newest = summary.oldest_version, summary.newest_version
    if 0 <= oldest <= newest <= state.last_sampled:
        return ""
    return (
        f"the trajectory was sampled under versions {oldest} to {newest}: those of this run are 0 "
        f"to {state.last_sampled}"
    )


def _of_weights(state: LedgerState, stated: wire.Ready) -> str:
    if stated.policy_version > state.last_sampled:
        return (
            f"policy_version {stated.policy_version} of {stated.actor_id}: no step beyond "
            f"{state.last_sampled} was sampled"
        )
    return _of_incarnation(state, stated.incarnation)


def _of_leases(state: LedgerState, hello: wire.Hello) -> str:
    recorded = state.held.get(hello.actor_id, set())
    for group_id, sibling in hello.held:
        if (group_id, sibling) in recorded:
            continue
        if not state.was_opened(group_id) or sibling >= state.size_of(group_id):
            return f"{hello.actor_id} holds group {group_id}, sibling {sibling}: there is none"
    return ""


def _of_resumption(state: LedgerState, message: wire.Resume) -> str:
    if message.step > state.last_sampled + 1:
        return (
            f"step {message.step} lies beyond step {state.last_sampled}, the last that was "
            "sampled: start from a checkpoint of this run, or put back the event log that goes "
            "with it"
        )
    return _of_incarnation(state, message.incarnation)


def _of_incarnation(state: LedgerState, incarnation: int) -> str:
    if incarnation <= state.incarnation + MOST_STARTS_UNHEARD:
        return ""
    return (
        f"incarnation {incarnation}: this run is at {state.incarnation}, and no learner starts "
        f"{MOST_STARTS_UNHEARD} times unheard"
    )

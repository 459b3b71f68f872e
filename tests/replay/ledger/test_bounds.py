"""Whatever a holder of a key says of the run: what cannot be is refused, and nothing is folded."""

from typing import Any

import pytest

from replay.protocol import (
    Batch,
    Deliver,
    Evaluate,
    Heartbeat,
    Hello,
    LeaseFailed,
    Ready,
    Refused,
    Report,
    Resume,
    Resumed,
    Unknown,
)

BEYOND = [
    Ready("a", 100, 1, 10**6),
    Ready("a", 100, 10**9, 0),
    Heartbeat("a", {}, Ready("a", 100, 1, 3)),
    Hello("b", "digest", held=((10**9, 0),)),
    Hello("b", "digest", held=((1, 2),)),
    Deliver("a", 10**9, 0, b""),
    Deliver("a", 1, 2, b""),
    Resume(2**62, 2),
    Resume(2, 10**15),
    Resume(2, 4),
    Evaluate(1, 3),
    Report(1, 4, {}),
]


@pytest.fixture
def trained(scene: Any) -> Any:
    """Two steps are sampled, an actor serves the second, and groups are open."""
    s = scene(groups_per_step=1, max_staleness=1)
    s.learner()
    s.actor("a", 4)
    s.train("a", 2)
    s.send("a", Ready("a", 100, 1, 2))
    return s


@pytest.mark.parametrize("message", BEYOND, ids=repr)
def test_what_this_run_cannot_have_come_to_is_refused(trained: Any, message: Any) -> None:
    s, before = trained, len(trained.log)
    opened = dict(s.ledger.state.opened)
    reply = s.send("a", message)
    assert isinstance(reply, Refused) and reply.cause
    assert len(s.log) == before and s.ledger.state.opened == opened
    s.deliver_all("a", version=2)
    assert isinstance(s.sample(2), Batch), "the run goes on"


def test_versions_that_were_never_published_are_no_trajectory(trained: Any) -> None:
    s = trained
    lease = s.leased["a"][0]
    assert "versions 3 to 3: those of this run are 0 to 2" in s.deliver("a", lease, version=3)
    assert "versions -1 to -1" in s.deliver("a", lease, version=-1)
    assert s.deliver("a", lease, version=2) == "accepted"


def test_the_last_step_may_have_gone_unheard(trained: Any) -> None:
    assert trained.learner(step=3, incarnation=2) == Resumed(0)


def test_nobody_fails_the_leases_of_another(trained: Any) -> None:
    s = trained
    held = set(s.ledger.state.held["a"])
    for group_id, sibling in held:
        reply = s.send("stranger", LeaseFailed("a", group_id, sibling, "its question is bad"))
        assert reply == Unknown()
    assert s.ledger.state.held["a"] == held and not s.ledger.state.failures.counts

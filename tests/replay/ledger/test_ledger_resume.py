"""A learner that starts again: the same batches, in the same order, before anything else."""

from typing import Any

import pytest

from replay.protocol import (
    Batch,
    Committed,
    Evaluate,
    Finish,
    Ready,
    Refused,
    Report,
    Resume,
    Resumed,
    Wait,
)


@pytest.fixture
def trained(scene: Any) -> Any:
    """Four steps sampled, step 2 committed, an actor with room; the learner is about to resume."""
    s = scene(groups_per_step=1, max_staleness=2)
    s.learner()
    s.actor("a", 100)
    s.train("a", 4)
    s.send("learner", Committed(1, 2))
    return s


def test_recorded_batches_come_again_in_the_same_composition(trained: Any) -> None:
    before = [trained.sample(2), trained.sample(3)]
    assert trained.learner(step=2, incarnation=2) == Resumed(2)
    assert [trained.sample(2, 2), trained.sample(3, 2)] == before


def test_they_come_in_order(trained: Any) -> None:
    trained.learner(step=2, incarnation=2)
    assert "step 3 comes next" in trained.sample(3, 2).cause
    assert "step 3 comes next" in trained.sample(4, 2).cause


def test_nothing_is_leased_until_the_learner_asks_for_something_new(trained: Any) -> None:
    s = trained
    before = len(s.leased["a"])
    s.learner(step=2, incarnation=2)
    s.send("a", Ready("a", 100, 2, 4))
    assert len(s.leased["a"]) == before
    s.sample(2, 2)
    assert len(s.leased["a"]) == before
    s.sample(3, 2)
    assert len(s.leased["a"]) == before
    s.sample(4, 2)
    assert len(s.leased["a"]) > before


def test_an_evaluation_is_leased_once_they_are_trained(scene: Any) -> None:
    s = scene(evals=1, groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 100)
    s.train("a", 1)
    s.send("a", Ready("a", 100, 2, 1))
    s.learner(step=0, incarnation=2)
    s.send("learner", Evaluate(2, 0))
    assert s.leased["a"] == []
    s.sample(0, 2)
    s.send("learner", Evaluate(2, 1))
    assert {lease.kind for lease in s.leased["a"]} == {"eval", "train"}


def test_groups_do_not_grow_old_meanwhile(trained: Any) -> None:
    s = trained
    s.send("a", Ready("a", 100, 1, 4))
    opened = dict(s.ledger.state.opened)
    s.learner(step=2, incarnation=2)
    for _ in range(4):
        s.tick(100)
    assert opened and s.ledger.state.opened == opened


def test_an_actor_of_the_old_incarnation_gets_nothing_but_may_deliver(trained: Any) -> None:
    s = trained
    s.send("a", Ready("a", 100, 1, 4))
    first, second, *others = s.leased["a"]
    s.learner(step=4, incarnation=2)
    s.fail("a", second)
    assert s.leased["a"] == [first, *others]
    assert s.deliver("a", first, version=4) == "accepted"


def test_resuming_commits_what_lies_before(trained: Any) -> None:
    trained.learner(step=3, incarnation=2)
    assert list(trained.ledger.state.batches) == [4]
    assert trained.ledger.state.counters.committed == 3


def test_resuming_before_a_committed_step_is_refused(trained: Any) -> None:
    assert "step 2, which is committed" in trained.learner(step=1, incarnation=2).cause


def test_an_incarnation_must_be_higher(trained: Any) -> None:
    assert "must exceed 1" in trained.send("other", Resume(1, 4)).cause


def test_a_repeated_resume_of_the_same_learner_is_answered(trained: Any) -> None:
    trained.send("learner", Resume(2, 2, "mine"))
    trained.restart()
    assert trained.send("reconnected", Resume(2, 2, "mine")) == Resumed(2)
    assert isinstance(trained.send("learner", Resume(2, 2, "other")), Refused)
    assert isinstance(trained.send("learner", Resume(2, 2)), Refused)
    trained.sample(2, 2)
    assert isinstance(trained.send("learner", Resume(2, 2, "mine")), Refused)


def test_a_learner_of_before_the_run_went_on_is_refused(trained: Any) -> None:
    trained.send("learner", Resume(2, 2, "mine"))
    trained.restart(resumed=True)
    assert "must exceed 2" in trained.send("learner", Resume(2, 2, "mine")).cause


@pytest.mark.parametrize("message", [Committed, Evaluate, Finish, Report])
def test_an_older_incarnation_is_refused(trained: Any, message: Any) -> None:
    trained.learner(step=4, incarnation=2)
    stale = {Finish: Finish(1), Report: Report(1, 4, {})}.get(message) or message(1, 4)
    assert "incarnation 1 is over" in trained.send("learner", stale).cause
    assert "incarnation 1 is over" in trained.sample(4, 1).cause


def test_served_batches_survive_a_restart_of_replay(trained: Any) -> None:
    s = trained
    s.learner(step=2, incarnation=2)
    again = s.sample(2, 2)
    s.restart()
    assert isinstance(again, Batch)
    assert s.sample(2, 2).groups == again.groups
    assert s.sample(3, 2).step == 4


def test_a_learner_ahead_of_the_log_trains_nothing_twice(trained: Any) -> None:
    s = trained
    s.send("a", Ready("a", 100, 1, 4))
    s.deliver_all("a", version=4)
    assert s.ledger.state.ready
    assert s.learner(step=5, incarnation=2) == Resumed(0)
    assert not s.ledger.state.ready
    assert s.dropped["resumed"] > 0
    assert isinstance(s.sample(5, 2), Wait)


def test_admission_counts_the_steps_of_a_learner_ahead_of_the_log(scene: Any) -> None:
    s = scene(groups_per_step=2, max_staleness=1)
    s.learner(step=1)
    s.actor("a", 100, version=1)
    assert len(s.ledger.state.opened) == 4

"""The end of a run; the books close."""

from typing import Any

import msgspec
import pytest

from replay.protocol import (
    Committed,
    Deliver,
    Done,
    Evaluate,
    Finish,
    Observe,
    Report,
    Resume,
    Shutdown,
    Stop,
)


@pytest.fixture
def stopped(scene: Any) -> Any:
    """A run with a batch sampled, a group ready, groups open and an evaluation under way."""
    s = scene(evals=3, groups_per_step=1, max_staleness=2)
    s.learner()
    s.actor("a", 6)
    s.deliver("a", s.leased["a"][0])
    s.deliver("a", s.leased["a"][0])
    s.deliver("a", s.leased["a"][0])
    s.deliver("a", s.leased["a"][0])
    s.sample(0)
    s.send("learner", Evaluate(1, 0))
    s.held = list(s.leased["a"])
    assert s.send("launcher", Shutdown("Ctrl-C")) == Done()
    return s


def test_actors_are_told_to_stop(stopped: Any) -> None:
    assert stopped.got["a"][-1] == Stop("Ctrl-C")


def test_the_learner_is_told_to_stop_but_may_commit(stopped: Any) -> None:
    assert stopped.sample(1) == Stop("Ctrl-C")
    assert stopped.send("learner", Evaluate(1, 0)) == Stop("Ctrl-C")
    assert stopped.send("learner", Committed(1, 1)) == Done()
    assert stopped.send("learner", Report(1, 1, {})) == Done()
    assert stopped.send("learner", Finish(1)) == Done()


def test_late_comers_are_told_to_stop(stopped: Any) -> None:
    assert stopped.actor("b", 8) == Stop("Ctrl-C")
    assert stopped.send("other", Resume(2, 1)) == Stop("Ctrl-C")


def test_what_is_left_is_dropped_and_no_longer_needed(stopped: Any) -> None:
    assert stopped.dropped == {"run_ended": 2}
    assert [stopped.deliver("a", lease) for lease in stopped.held] == ["dropped"] * 6


def test_every_train_group_is_accounted_for(stopped: Any) -> None:
    stopped.send("learner", Committed(1, 1))
    counters = stopped.ledger.state.counters
    assert counters.opened == counters.committed + counters.dropped.total() == 3


def test_the_first_cause_stays(stopped: Any) -> None:
    stopped.send("launcher", Shutdown("again"))
    assert stopped.ledger.stop_cause == "Ctrl-C"
    status = stopped.send("launcher", Observe(0, 0))
    assert (status.stop_cause, status.phase) == ("Ctrl-C", "stopped: Ctrl-C")


def test_a_restarted_replay_is_still_stopped(stopped: Any) -> None:
    stopped.restart()
    assert stopped.sample(1) == Stop("Ctrl-C")


def test_finish_completes_the_run(scene: Any) -> None:
    s = scene()
    s.learner()
    s.send("learner", Finish(1))
    assert s.ledger.stop_cause == "completed"


@pytest.mark.parametrize("drop_no_signal", [True, False])
def test_ten_steps_of_zero_rewards_stop_the_run(scene: Any, drop_no_signal: bool) -> None:
    s = scene(groups_per_step=1, max_staleness=20, drop_no_signal=drop_no_signal)
    s.learner()
    s.actor("a", 2)
    for _ in range(9):
        s.deliver_all("a", reward=0.0)
    assert not s.ledger.stop_cause
    s.deliver_all("a", reward=0.0)
    assert "the last 10 closed train groups all had reward 0" in s.sample(0).cause


def deliver_unscorable(s: Any, tools: Any) -> None:
    for lease in list(s.leased["a"]):
        summary = tools.summary_for(lease)
        summary = msgspec.structs.replace(summary, reward=None, reward_cause="custom: KeyError")
        payload = msgspec.msgpack.encode(summary)
        s.send("a", Deliver("a", lease.group_id, lease.sibling, payload))
        s.leased["a"].remove(lease)


def test_a_run_that_nothing_was_ever_scored_in_ends_by_that_cause(scene: Any, tools: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=20)
    s.learner()
    s.actor("a", 2)
    for _ in range(3):
        deliver_unscorable(s, tools)
    assert not s.ledger.stop_cause
    s.restart()
    assert s.ledger.state.counters.streaks.unscored == 3
    s.learner()
    s.actor("a", 2)
    deliver_unscorable(s, tools)
    said = "none of the first 4 closed train groups could be scored: custom: KeyError"
    assert s.sample(0) == Stop(said)


def test_a_judge_that_falls_silent_later_does_not_end_it(scene: Any, tools: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=20)
    s.learner()
    s.actor("a", 2)
    s.deliver_all("a", reward=0.0)
    for _ in range(8):
        deliver_unscorable(s, tools)
    assert not s.ledger.stop_cause and s.dropped == {"unscorable": 8}


TYPO = "ProgramFailed: it ended with exit status 1: No module named typo"


def test_a_program_that_fails_and_fails_ends_the_run_and_is_named(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=9, max_question_failures=2)
    s.learner()
    s.actor("a", 3)
    for n in range(7):
        s.fail("a", s.leased["a"][0], TYPO if n % 2 else "TooManyCalls: 300 calls")
        s.fail("a", s.leased["a"][0], "RetrievalUnreachable: refused")
    s.restart()
    s.actor("b", 3)
    s.tick(11)
    assert not s.ledger.stop_cause and not s.dropped
    s.fail("b", s.leased["b"][0], TYPO)
    said = f"the program failed in 8 rollouts, and none came between them: {TYPO}"
    assert s.ledger.stop_cause == said and not s.ledger.state.questions.retired_count


@pytest.mark.parametrize("mended", ["delivered", "resumed"])
def test_one_that_works_now_and_then_does_not(scene: Any, mended: str) -> None:
    s = scene(groups_per_step=1, max_staleness=9)
    s.learner()
    s.actor("a", 3)
    for n in range(14):
        s.fail("a", s.leased["a"][0], TYPO)
        if n == 6 and mended == "delivered":
            s.deliver_all("a")
        elif n == 6:
            s.restart(resumed=True)
            s.learner(incarnation=2)
            s.sample(0, 2)
            s.actor("a", 3, incarnation=2)
    assert not s.ledger.stop_cause


def test_a_single_reward_keeps_it_running(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=30)
    s.learner()
    s.actor("a", 2)
    for i in range(20):
        s.deliver_all("a", reward=0.0 if i != 9 else None)
    assert s.ledger.stop_cause == "the last 10 closed train groups all had reward 0: no gradient"
    assert s.ledger.state.counters.recent.closed == 20

"""Failed rollouts, lost actors, deadlines, replay's restart: nothing wedged, nothing doubled."""

from typing import Any

import pytest
from msgspec.structs import replace

from replay.log.records import LeaseReturned
from replay.protocol import Evaluate, Goodbye, Hello, LeaseFailed, Ready, Unknown, Welcome
from replay.trajectory import Search


def test_a_failed_sibling_alone_is_leased_again_at_once(scene: Any) -> None:
    s = scene(group_size=3, groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 3)
    lease = s.leased["a"][1]
    s.fail("a", lease)
    assert s.leased["a"][-1] == replace(lease, attempt=1)
    assert len(s.leased["a"]) == 3


@pytest.mark.parametrize("cause", ["rollout took over 240 s", "EngineDead: gone", "ToolFailed: x"])
def test_what_a_rollout_itself_met_is_tried_again_with_other_seeds(scene: Any, cause: str) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    lease = s.leased["a"][0]
    for attempt in (1, 2):
        s.fail("a", s.leased["a"][0 if attempt == 1 else -1], cause)
        assert s.leased["a"][-1] == replace(lease, attempt=attempt)
    s.restart()  # the log alone tells how often it was tried
    s.actor("b", 2)
    s.tick(11)
    assert [x.attempt for x in s.leased["b"] if x.sibling == lease.sibling] == [2]


def test_a_resumed_run_goes_on_with_the_same_seeds(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    failed, other = s.leased["a"]
    s.fail("a", failed, "rollout took over 240 s")
    s.restart(resumed=True)
    s.learner(incarnation=2)
    s.sample(0, 2)
    s.actor("b", 2, incarnation=2)
    assert s.leased["b"] == [replace(failed, attempt=1), other]


@pytest.mark.parametrize("cause", ["shutdown", "RetrievalUnreachable: refused", "goodbye"])
def test_what_was_interrupted_from_outside_is_made_again_as_it_was(scene: Any, cause: str) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    lease = s.leased["a"][0]
    s.fail("a", lease, cause)
    assert s.leased["a"][-1] == lease


@pytest.mark.parametrize(
    "cause",
    [
        "UnverifiedWeights: no verified weights for 30 s",
        "EngineDead: the engine's process is gone",
        "shutdown",
        "rollout took over 240 s",
        "sampled under version 1 < 2",
    ],
)
def test_no_fault_of_the_infrastructure_retires_a_question(scene: Any, cause: str) -> None:
    s = scene(groups_per_step=1, max_staleness=0, max_question_failures=2)
    s.learner()
    s.actor("a", 9)
    for _ in range(5):
        lease = next(x for x in s.leased["a"] if x.sibling == 0)
        s.fail("a", lease, cause)
    assert s.dropped == {} and not s.ledger.state.questions.retired


def test_no_lost_actor_retires_a_question(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0, max_question_failures=2)
    s.learner()
    for _ in range(4):
        s.actor("a", 2)
        s.lose("a")
    assert s.dropped == {} and not s.ledger.state.questions.retired


def test_what_a_failed_rollout_searched_for_is_on_record(scene: Any) -> None:
    s = scene(group_size=2, groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    lease, made = s.leased["a"][0], (Search("who?", ("p1",), 0.5, "ok"),)
    s.send("a", LeaseFailed("a", lease.group_id, lease.sibling, "late", made))
    assert [x.searches for x in s.log if isinstance(x, LeaseReturned)] == [made]


def test_so_it_is_where_the_failure_comes_over_a_new_connection_before_a_hello(scene: Any) -> None:
    s = scene(group_size=2, groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2, instance="drawn")
    lease, made = s.leased["a"][0], (Search("who?", ("p1",), 0.5, "ok"),)
    failed = LeaseFailed("a", lease.group_id, lease.sibling, "late", made)
    for other in "", "guessed":
        assert s.send("new", replace(failed, instance=other)) == Unknown()
    s.send("new", replace(failed, instance="drawn"))
    assert s.send("new", Hello("a", "digest", instance="drawn")) == Welcome()
    returned = [(x.cause, x.searches) for x in s.log if isinstance(x, LeaseReturned)]
    assert returned[0] == ("late", made)


def test_it_is_leased_only_to_an_actor_with_at_least_the_groups_version(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner(step=1)
    s.actor("a", 2, version=1)
    s.actor("b", 1, version=0)
    lost = s.leased["a"]
    s.lose("a")
    assert "b" not in s.leased
    s.send("b", Ready("b", 2, 1, 1))
    assert s.leased["b"] == lost


def test_a_lost_actors_leases_go_to_others(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("b", 2)
    s.actor("a", 2)
    lost = s.leased["b"]
    s.lose("b")
    assert s.leased["a"] == lost


def test_a_goodbye_returns_what_is_held(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    s.send("a", Goodbye("a"))
    assert [x.cause for x in s.log if isinstance(x, LeaseReturned)] == ["goodbye", "goodbye"]
    assert "on nobody: 2 of 2 siblings missing" in s.sample(0).reason


def test_the_first_delivery_wins_whoever_makes_it(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("b", 2)
    lease = s.leased["b"][0]
    s.lose("b")
    s.actor("a", 2)
    assert s.deliver("b", lease) == "accepted"
    assert s.deliver("a", lease) == "superseded"


def test_a_superseded_rollout_counts_against_capacity_until_it_answers(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=1)
    s.learner()
    s.actor("b", 2)
    first, second = s.leased["b"]
    s.lose("b")
    s.actor("a", 3)
    for lease in (first, second):
        s.deliver("b", lease)
    assert len(s.leased["a"]) == 2  # room for one more, a group needs two
    s.deliver("a", first)
    assert len(s.leased["a"]) == 3


def test_a_question_that_keeps_failing_is_retired(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0, max_question_failures=3)
    s.learner()
    s.actor("a", 3)
    question = s.leased["a"][0].question
    for _ in range(3):
        s.fail("a", next(x for x in s.leased["a"] if x.sibling == 0))
    assert s.dropped == {"question_failed": 1}
    assert s.ledger.state.questions.retired == {question.id}
    assert s.leased["a"][-1].group_id == 2


def test_failures_of_different_siblings_do_not_add_up(scene: Any) -> None:
    s = scene(groups_per_step=1, group_size=4, max_question_failures=2)
    s.learner()
    s.actor("a", 4)
    for lease in list(s.leased["a"]):
        s.fail("a", lease)
    assert s.dropped == {}


def test_an_answered_question_starts_afresh(scene: Any) -> None:
    s = scene(questions=1, groups_per_step=1, max_staleness=1, max_question_failures=2)
    s.learner()
    s.actor("a", 2)
    for _ in range(3):
        step = s.ledger.state.last_sampled
        s.fail("a", s.leased["a"][0])
        s.deliver_all("a", version=step)
        s.sample(step)
        s.send("a", Ready("a", 2, 1, step + 1))
    assert s.dropped == {}


@pytest.mark.parametrize(
    "whose", ["ToolFailed", "EnvironmentFailed", "ProgramFailed", "TooManyCalls"]
)
def test_no_failure_of_a_users_code_retires_a_question(scene: Any, whose: str) -> None:
    s = scene(groups_per_step=1, max_staleness=0, max_question_failures=2)
    s.learner()
    s.actor("a", 9)
    for _ in range(5):
        s.fail("a", s.leased["a"][0], f"{whose}: tool 'calculator': OSError: down")
    assert s.dropped == {} and not s.ledger.state.questions.retired


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_no_outage_of_the_retrieval_server_retires_a_question(scene: Any, kind: str) -> None:
    s = scene(evals=1, groups_per_step=1, max_staleness=0, max_question_failures=2)
    s.learner()
    s.actor("a", 9)
    if kind == "eval":
        s.send("learner", Evaluate(1, 0))
    lease = next(lease for lease in s.leased["a"] if lease.kind == kind)
    for _ in range(20):
        s.fail("a", lease, "RetrievalUnreachable: http://127.0.0.1:8000: ConnectError: refused")
    assert lease in s.leased["a"] and not s.dropped
    for _ in range(2):
        s.fail("a", lease, "RetrievalRefused: too long a query")
    assert lease not in s.leased["a"]


def test_when_every_question_is_retired_the_run_stops(scene: Any) -> None:
    s = scene(questions=1, max_question_failures=1)
    s.learner()
    s.actor("a", 2)
    s.fail("a", s.leased["a"][0])
    assert "retired" in s.sample(0).cause


def test_a_group_past_its_deadline_is_dropped_and_its_question_requeued(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0, group_deadline_s=300)
    s.learner()
    s.actor("a", 2)
    late, other = s.leased["a"]
    s.deliver("a", other)
    s.tick(299)
    assert s.dropped == {}
    s.actor("b", 2)
    s.tick(1)
    assert s.dropped == {"group_deadline": 1}
    assert s.leased["b"][0].question == late.question
    assert s.leased["b"][0].group_id == 2
    assert s.deliver("a", late) == "dropped"


def test_a_question_that_only_meets_deadlines_is_retired(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0, group_deadline_s=300, max_question_failures=2)
    s.learner()
    s.actor("a", 100)
    s.tick(300)
    s.tick(300)
    assert s.dropped == {"group_deadline": 1, "question_failed": 1}
    assert len(s.ledger.state.questions.retired) == 1


def test_a_closed_group_has_no_deadline(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    s.deliver_all("a")
    s.tick(10_000)
    assert s.sample(0).group_ids == (1,)


def test_after_a_restart_held_leases_are_adopted(scene: Any) -> None:
    s = scene(groups_per_step=1)
    s.learner()
    s.actor("a", 2)
    s.restart()
    s.actor("b", 1)
    s.actor("a", 2, held=((1, 0), (1, 1)))
    assert len(s.leased["a"]) == 2
    assert "b" not in s.leased
    s.deliver_all("a")
    assert s.sample(0).group_ids == (1,)


def test_after_a_restart_leases_not_held_any_more_are_leased_again(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    s.restart()
    s.actor("a", 2, held=((1, 0),))
    assert [x.sibling for x in s.leased["a"]] == [0, 1, 1]


def test_no_question_pays_for_restarts_of_replay(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0, max_question_failures=2, dead_after_s=10)
    s.learner()
    s.actor("a", 2)
    for name in ("a", "a", "b", "c"):  # it comes back with nothing, twice; then others do
        s.restart()
        s.actor(name, 2)
        s.tick(11)
    assert s.dropped == {}
    assert not s.ledger.state.questions.retired


def test_what_is_being_delivered_stays_as_it_is_on_record(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    first, second = s.leased["a"]
    s.deliver("a", first)  # nothing is known of the other: it was under way when replay was killed
    s.restart()
    s.actor("a", 2, delivering=((1, 0), (1, 1)))
    assert s.ledger.state.held["a"] == {(1, 1)}
    assert s.deliver("a", second) == "accepted"
    assert s.ledger.state.counters.superseded == s.ledger.state.counters.returned == 0


def test_an_actor_may_leave_before_it_said_hello_again(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    s.restart()
    s.send("a", Goodbye("a"))
    s.actor("b", 2)
    assert len(s.leased["b"]) == 2


def test_after_a_restart_absent_actors_are_given_up(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0, dead_after_s=10)
    s.learner()
    s.actor("a", 2)
    s.restart()
    s.actor("b", 2)
    s.tick(9)
    assert "b" not in s.leased
    s.tick(1)
    assert len(s.leased["b"]) == 2


def test_time_in_which_replay_was_down_is_no_ones_delay(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0, group_deadline_s=300)
    s.learner()
    s.actor("a", 2)
    s.restart()
    s.tick(5000)
    s.actor("a", 2, held=((1, 0), (1, 1)))
    s.tick(299)
    assert s.dropped == {}
    s.tick(1)
    assert s.dropped == {"group_deadline": 1}


def test_an_actor_that_comes_back_takes_up_what_nobody_else_has(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    s.lose("a")
    s.actor("a", 2, held=((1, 0),))
    assert [(x.group_id, x.sibling) for x in s.leased["a"]] == [(1, 1)]


def test_a_second_hello_of_the_same_connection_is_taken(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    assert s.send("a", Hello("a", "digest", ((1, 0), (1, 1)))) == Welcome()
    assert s.ledger.state.held["a"] == {(1, 0), (1, 1)}


def test_a_sibling_that_another_still_holds_is_not_leased_a_third_time(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 2)
    both = list(s.leased["a"])
    s.lose("a")
    s.actor("b", 4)
    s.actor("a", 4, held=((1, 0), (1, 1)))
    s.fail("b", both[0])
    assert (s.leased["b"], "a" in s.leased) == ([both[1]], False)
    s.fail("a", both[0])
    again = [(lease.group_id, lease.sibling) for lease in s.leased["b"]]
    assert again == [(1, both[1].sibling), (1, both[0].sibling)]

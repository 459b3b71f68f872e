"""Evaluations: first in line, outside admission, buffer and training."""

from typing import Any

import msgspec
import pytest

from replay.log.records import EVAL_GROUPS
from replay.protocol import Deliver, Evaluate, Observe


def evaluate(s: Any, step: int, incarnation: int = 1) -> Any:
    return s.send("learner", Evaluate(incarnation, step))


def test_each_question_is_leased_greedy_and_sampled(scene: Any) -> None:
    s = scene(evals=2)
    s.learner()
    assert evaluate(s, 0).total == 4
    s.actor("a", 4)
    leased = [(x.question.id, x.kind, x.sibling, x.sampling.temperature) for x in s.leased["a"]]
    assert leased == [
        ("e-0", "eval", 0, 0.0),
        ("e-0", "eval", 1, 1.0),
        ("e-1", "eval", 0, 0.0),
        ("e-1", "eval", 1, 1.0),
    ]


def test_they_come_before_train_leases_and_need_one_slot(scene: Any) -> None:
    s = scene(evals=2, group_size=2)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 3)
    assert [x.kind for x in s.leased["a"]] == ["eval"] * 3
    s.deliver("a", s.leased["a"][0])
    assert [x.kind for x in s.leased["a"]] == ["eval"] * 3


def test_they_are_outside_admission_and_buffer(scene: Any) -> None:
    s = scene(evals=5, max_staleness=0, groups_per_step=1)
    s.learner()
    s.actor("a", 2)
    evaluate(s, 0)
    s.deliver_all("a")
    s.deliver_all("a")
    assert len(s.ledger.state.ready) == 1
    assert s.ledger.state.admitted == 1


def test_they_change_no_train_groups_id(scene: Any) -> None:
    s = scene(evals=2, max_staleness=0)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 8)
    leased = {(lease.kind, lease.group_id) for lease in s.leased["a"]}
    evals = {("eval", EVAL_GROUPS), ("eval", EVAL_GROUPS + 1)}
    assert leased == {("train", 1), ("train", 2)} | evals


def test_an_evaluation_is_never_trained_on(scene: Any) -> None:
    s = scene(evals=4, groups_per_step=1)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 8)
    s.deliver_all("a")
    assert "0 of 1 groups ready" in s.sample(0).reason
    assert s.ledger.state.counters.recent.rollouts == 0


def test_the_result_is_exact_match_overall_and_by_hops(scene: Any) -> None:
    s = scene(evals=4)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 8)
    for lease in list(s.leased["a"]):
        right = lease.question.id in ("e-0", "e-2", "e-3") and lease.sibling == 0
        s.deliver("a", lease, reward=float(right), searches=lease.question.hops)
    result = evaluate(s, 0).result
    assert (result.questions, result.em, result.sampled_em) == (4, 0.75, 0.0)
    assert result.em_by_hops == {"1": 1.0, "2": 0.5}
    assert result.searches == 1.5


def test_evaluations_are_sampled_at_their_own_temperature(scene: Any) -> None:
    s = scene(evals=2, eval_temperatures=(0.0, 0.6))
    s.learner()
    evaluate(s, 0)
    s.actor("a", 4)
    found = [(lease.sibling, lease.sampling.temperature) for lease in s.leased["a"]]
    assert found == [(0, 0.0), (1, 0.6)] * 2


def test_an_evaluation_may_be_greedy_alone(scene: Any) -> None:
    s = scene(evals=3, eval_temperatures=(0.0,))
    s.learner()
    evaluate(s, 0)
    s.actor("a", 9)
    assert [(lease.sibling, lease.kind) for lease in s.leased["a"][:3]] == [(0, "eval")] * 3
    for lease in s.leased["a"][:3]:
        s.deliver("a", lease, reward=1.0)
    reply = evaluate(s, 0)
    assert (reply.done, reply.total) == (3, 3)
    assert (reply.result.em, reply.result.sampled_em) == (1.0, None)
    assert reply.result.sampled_em_by_hops == {}


def test_the_result_spans_the_versions_seen(scene: Any) -> None:
    s = scene(evals=1)
    s.learner(step=1)
    evaluate(s, 0)
    s.actor("a", 2)
    s.deliver("a", s.leased["a"][0], version=0)
    s.deliver("a", s.leased["a"][0], version=1)
    result = evaluate(s, 0).result
    assert (result.oldest_version, result.newest_version) == (0, 1)


def test_unscorable_rollouts_are_left_out(scene: Any, tools: Any) -> None:
    s = scene(evals=2)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 4)
    first = s.leased["a"][0]
    nothing = msgspec.structs.replace(tools.summary_for(first), reward=None)
    s.send("a", Deliver("a", first.group_id, 0, msgspec.msgpack.encode(nothing)))
    s.deliver_all("a", reward=1.0)
    assert evaluate(s, 0).result.em == 1.0


def test_asking_again_opens_nothing(scene: Any) -> None:
    s = scene(evals=2)
    s.learner()
    assert evaluate(s, 0) == evaluate(s, 0)
    s.actor("a", 4)
    s.deliver_all("a")
    first = evaluate(s, 0)
    assert first == evaluate(s, 0)
    assert (first.done, first.total) == (4, 4)
    assert len(s.send("console", Observe(0, 0)).evaluations) == 1


def test_results_ride_on_the_next_batch_once(scene: Any) -> None:
    s = scene(evals=1, groups_per_step=1)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 100)
    s.deliver_all("a")
    first = s.sample(0)
    assert [r.step for r in first.evaluations] == [0]
    assert s.sample(0).evaluations == first.evaluations
    s.deliver_all("a")
    assert s.sample(1).evaluations == ()


def test_without_questions_the_result_is_empty_at_once(scene: Any) -> None:
    s = scene(evals=0)
    s.learner()
    assert evaluate(s, 0).result.questions == 0


def test_a_failed_rollout_is_leased_again(scene: Any) -> None:
    s = scene(evals=1)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 2)
    lease = s.leased["a"][0]
    s.fail("a", lease, "shutdown")
    assert s.leased["a"][-1] == lease


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_question_that_cannot_be_answered_is_given_up(scene: Any, how: str) -> None:
    s = scene(evals=2, max_question_failures=2, group_deadline_s=300)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 100)
    for lease in [x for x in s.leased["a"] if x.question.id == "e-1"]:
        s.deliver("a", lease)
    for _ in range(2):
        if how == "fails":
            greedy = [x for x in s.leased["a"] if x.question.id == "e-0" and x.sibling == 0]
            s.fail("a", greedy[0])
        else:
            s.tick(300)
    progress = evaluate(s, 0)
    assert (progress.done, progress.result.questions) == (4, 1)


def test_a_resumed_learner_evaluates_lost_steps_anew(scene: Any) -> None:
    s = scene(evals=1, groups_per_step=1)
    s.learner()
    s.actor("a", 100)
    s.train("a", 3)
    evaluate(s, 3)
    late = [x for x in s.leased["a"] if x.kind == "eval"]
    s.learner(step=2, incarnation=2)
    assert s.deliver("a", late[0]) == "dropped"
    s.sample(2, 2)
    assert evaluate(s, 3, incarnation=2).done == 0


def test_a_resumed_learner_keeps_the_evaluations_of_kept_steps(scene: Any) -> None:
    s = scene(evals=1)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 2)
    s.deliver_all("a")
    s.learner(step=0, incarnation=2)
    assert evaluate(s, 0, incarnation=2).result is not None


def test_status_says_how_far_it_is(scene: Any) -> None:
    s = scene(evals=2)
    s.learner()
    evaluate(s, 0)
    s.actor("a", 4)
    s.deliver("a", s.leased["a"][0])
    phase = s.send("console", Observe(0, 0)).phase
    assert phase == "evaluation of step 0: 1 of 4 rollouts"


def test_each_data_set_has_a_result_and_so_has_each_part(scene: Any) -> None:
    s = scene(evals=4)
    named = ("nq", "nq", "hotpotqa", "")
    s.ledger.state.eval_questions = tuple(
        msgspec.structs.replace(question, source=source)
        for question, source in zip(s.ledger.state.eval_questions, named, strict=True)
    )
    s.learner()
    evaluate(s, 0)
    s.actor("a", 8)
    for lease in list(s.leased["a"]):
        right = float(lease.question.id in ("e-0", "e-2") and lease.sibling == 0)
        told = {"em": right, "f1": 0.5} | ({"judge": 1.0} if lease.question.source == "nq" else {})
        s.deliver("a", lease, reward=right, parts=told)
    result = evaluate(s, 0).result
    assert (result.em, result.parts, result.sampled_parts) == (0.5, {"f1": 0.5}, {"f1": 0.5})
    assert {name: (of.questions, of.em, of.sampled_em) for name, of in result.sets.items()} == {
        "nq": (2, 0.5, 0.0),
        "hotpotqa": (1, 1.0, 0.0),
        "other": (1, 0.0, 0.0),
    }
    assert result.sets["nq"].parts == {"f1": 0.5, "judge": 1.0}
    assert "judge" not in result.parts, "half of the rollouts make no mean"

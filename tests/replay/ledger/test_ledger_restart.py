"""A run that goes on after all its processes have ended: the log decides, and counters continue."""

from typing import Any

import msgspec
import pytest

from replay.log.records import GroupOpened, LeaseReturned
from replay.protocol import Batch, Evaluate, Finish, LogError, Resumed, Shutdown, Stop, Wait


@pytest.fixture
def killed(scene: Any) -> Any:
    """Four steps sampled, groups open on an actor, one ready; then everything is killed."""
    s = scene(groups_per_step=1, max_staleness=2, questions=9)
    s.learner()
    s.actor("a", 100)
    s.train("a", 4)
    for lease in s.leased["a"][:2]:
        s.deliver("a", lease, version=4)
    s.restart(resumed=True)
    return s


def catch_up(s: Any, step: int = 2, capacity: int = 100) -> None:
    """A learner resumes, trains what is recorded and asks for more; an actor has its weights."""
    s.learner(step=step, incarnation=2)
    while isinstance(s.sample(step, 2), Batch):
        step += 1
    s.actor("a", capacity, version=step, incarnation=2)


def test_admission_goes_on_counting(killed: Any) -> None:
    catch_up(killed)
    state = killed.ledger.state
    sampled = state.last_sampled
    assert state.admitted == len(state.opened) + len(state.ready) + sampled
    assert state.admitted == 2 + sampled + 1, "max_staleness + version + 1, one group a step"


def test_group_ids_and_questions_go_on(killed: Any) -> None:
    catch_up(killed)
    opened = [fact for fact in killed.log if isinstance(fact, GroupOpened)]
    assert [fact.group_id for fact in opened] == list(range(1, len(opened) + 1))
    first_epoch = [fact.question.id for fact in opened[:9]]
    assert len(set(first_epoch)) == min(9, len(opened))


def test_recorded_batches_come_first_then_what_was_ready(killed: Any) -> None:
    ready = set(killed.ledger.state.ready)
    assert killed.learner(step=2, incarnation=2) == Resumed(2)
    assert [killed.sample(step, 2).step for step in (2, 3)] == [3, 4]
    assert ready and ready >= set(killed.sample(4, 2).group_ids)


def test_what_the_dead_held_is_leased_again_and_is_no_failure(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=2)
    s.learner()
    s.actor("a", 100)
    s.deliver("a", s.leased["a"][0])
    held = {(lease.group_id, lease.sibling) for lease in s.leased["a"]}
    s.restart(resumed=True)
    catch_up(s, step=0)
    assert len(held) == 5 and held <= {(x.group_id, x.sibling) for x in s.leased["a"]}
    assert s.ledger.state.failures.counts == {}
    assert not [fact for fact in s.log if isinstance(fact, LeaseReturned)]


def test_no_group_grows_old_while_the_processes_start(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=2)
    s.learner()
    s.actor("a", 100)
    held = set(s.ledger.state.opened)
    s.restart(resumed=True)
    s.tick()
    s.tick(1000.0)
    catch_up(s, step=0)
    assert len(held) == 3 and held <= set(s.ledger.state.opened)
    assert {lease.group_id for lease in s.leased["a"]} >= held


@pytest.mark.parametrize("size", [1, 3])
def test_a_log_of_another_group_size_is_refused(killed: Any, size: int) -> None:
    killed.config = msgspec.structs.replace(killed.config, group_size=size)
    with pytest.raises(LogError, match=r"record contradicts .* put back the run's own"):
        killed.restart()


def test_a_finished_run_can_go_on(scene: Any) -> None:
    s = scene(groups_per_step=1)
    s.learner()
    s.actor("a", 4)
    s.train("a", 1)
    s.send("learner", Finish(1))
    assert s.sample(1) == Stop("completed")
    s.restart(resumed=True)
    assert not s.ledger.stop_cause
    s.learner(step=1, incarnation=2)
    assert isinstance(s.sample(1, 2), Wait)
    s.actor("a", 4, version=1, incarnation=2)
    assert s.leased["a"]


def test_questions_that_the_end_cut_off_are_asked_again(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=1)
    s.learner()
    s.actor("a", 100)
    cut_off = {lease.question.id for lease in s.leased["a"]}
    s.send("launcher", Shutdown("SIGTERM"))
    s.restart(resumed=True)
    catch_up(s, step=0)
    assert {lease.question.id for lease in s.leased["a"]} == cut_off
    assert s.dropped == {"run_ended": 2}


def test_an_evaluation_that_the_end_cut_off_is_completed(scene: Any) -> None:
    s = scene(evals=2)
    s.learner()
    s.send("learner", Evaluate(1, 0))
    s.actor("a", 4)
    for lease in s.leased["a"][:3]:
        s.deliver("a", lease, reward=1.0)
    s.send("launcher", Shutdown("SIGTERM"))
    s.restart(resumed=True)
    catch_up(s, step=0)
    assert not s.ledger.state.results.count
    s.send("learner", Evaluate(2, 0))
    s.deliver_all("a", reward=1.0)
    assert s.ledger.state.results.kept[0].em == 1.0


def test_a_streak_without_reward_starts_again(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=20)
    s.learner()
    s.actor("a", 2)
    for _ in range(10):
        s.deliver_all("a", reward=0.0)
    assert s.ledger.stop_cause
    s.restart(resumed=True)
    catch_up(s, step=0, capacity=2)
    s.deliver_all("a", reward=0.0)
    assert not s.ledger.stop_cause

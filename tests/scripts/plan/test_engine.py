"""A simulated engine, turn by turn."""

from pytest import approx

from scripts.plan.engine import Engine, Engines, Group, Rollout
from scripts.plan.scenario import Sync
from scripts.plan.workload import Shape, Turn
from tests.scripts.plan.scenarios import scenario

TWO_TURNS = Shape(10, (Turn(100, 20, searches=True), Turn(40)))


def test_tokens_are_of_the_version_that_served_when_they_were_sampled() -> None:
    act, engine = Engines(scenario(sync=Sync(0.0, 0.25))), Engine(8)
    rollout = Rollout(Group(1, 0, 1), engine, TWO_TURNS, 0.0)
    act.begin(engine, rollout)
    act.update(0.5, 3)  # after 50 tokens; .25 s of pause follow
    act.advance(engine, 1.0)
    assert engine.progress == approx(75)
    assert act.next_end(engine) == approx(1.25)
    act.advance(engine, 1.25)
    assert act.end(engine) is rollout
    assert (rollout.versions, rollout.oldest) == (approx(50 * 3), 0)


def test_a_later_turn_takes_in_what_is_new_and_after_an_update_all() -> None:
    for updated, tokens in ((False, 20), (True, 130)):
        act, engine = Engines(scenario(prefill_s=0.01)), Engine(8)
        rollout = Rollout(Group(1, 0, 1), engine, TWO_TURNS, 0.0)
        act.begin(engine, rollout)
        act.advance(engine, 1.1)  # its prompt, and its turn
        act.end(engine)
        if updated:
            act.update(1.5, 1)
        act.advance(engine, 2.0)
        act.begin(engine, rollout)
        assert act.next_end(engine) == approx(2.0 + 0.01 * tokens + 0.4)
        assert engine.anew_s == approx(1.1 if updated else 0.0)


def test_another_sequence_is_taken_in_but_for_what_is_known_of_it() -> None:
    shape = Shape(10, (Turn(100, 20), Turn(40, prompt=50, known=8), Turn(5)))
    for updated, tokens in ((False, 42), (True, 50)):
        act, engine = Engines(scenario(prefill_s=0.01)), Engine(8)
        rollout = Rollout(Group(1, 0, 1), engine, shape, 0.0)
        act.begin(engine, rollout)
        act.advance(engine, 1.1)
        act.end(engine)
        if updated:
            act.update(1.5, 1)
        act.advance(engine, 2.0)
        act.begin(engine, rollout)
        assert (rollout.context, rollout.fresh) == (50, 0)
        assert act.next_end(engine) == approx(2.0 + 0.01 * tokens + 0.4)
        assert engine.anew_s == approx(0.08 if updated else 0.0)
        act.advance(engine, act.next_end(engine))
        act.end(engine)
        assert (rollout.context, rollout.fresh) == (90, 0)


def test_an_update_has_what_runs_taken_in_anew() -> None:
    act, engine = Engines(scenario(prefill_s=0.01)), Engine(8)
    act.begin(engine, Rollout(Group(1, 0, 1), engine, TWO_TURNS, 0.0))
    act.update(0.6, 1)  # the prompt's 10 tokens, and 50 sampled ones
    act.advance(engine, 0.6)
    assert engine.anew_s == approx(0.01 * 60)
    assert act.next_end(engine) == approx(0.6 + 0.6 + 0.5)


def test_who_waits_for_a_seat_gets_it_by_age() -> None:
    act, engine = Engines(scenario(seats=1)), Engine(8)
    for number in (1, 3, 2):
        act.begin(engine, Rollout(Group(number, 0, 1), engine, TWO_TURNS, 0.0))
    ends = []
    for _ in range(3):
        act.advance(engine, act.next_end(engine))
        ends.append(act.end(engine).group.number)
    assert ends == [1, 2, 3]

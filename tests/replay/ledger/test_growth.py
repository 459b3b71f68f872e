"""What an event costs does not grow with a run's history: counted in lines, not in seconds."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from replay.ledger.events import Tick
from replay.ledger.newest import Newest
from replay.protocol import Evaluate, Heartbeat, Observe
from replay.questions import Questions
from tests.replay.ledger.conftest import make_questions


def lines(act: Callable[[], object]) -> int:
    """How many lines are run, each turn of a loop counted."""
    count = 0

    def note(_frame: object, _event: str, _argument: object) -> Any:
        nonlocal count
        count += 1
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def evaluated(scene: Any, times: int) -> Any:
    """A run with so many evaluations behind it, and an actor with room."""
    s = scene(evals=1, groups_per_step=1, max_staleness=0)
    s.learner()
    s.actor("a", 100)
    for step in range(times):
        s.send("learner", Evaluate(1, step))
        s.train("a", 1, start=step)
    s.send("a", Heartbeat("a", {}))
    return s


def test_past_evaluations_cost_nothing(scene: Any) -> None:
    few, many = evaluated(scene, 2), evaluated(scene, 60)
    assert many.ledger.state.results.count == 60
    for peer, message in (("a", Heartbeat("a", {})), ("clock", Tick()), ("c", Observe(60, 60))):
        of_few, of_many = (lines(partial(s.send, peer, message)) for s in (few, many))
        assert of_many <= of_few + 5, message


def test_the_last_question_of_an_epoch_costs_no_shuffles_once_retired() -> None:
    supply = Questions(make_questions(500), seed=3)
    for _ in range(499):
        supply.next()
    supply.retire(supply.first().id)
    supply.peek()
    assert lines(supply.peek) < 20


def test_the_supply_is_the_same_however_often_it_is_looked_at() -> None:
    looked, blind = (Questions(make_questions(7), seed=3) for _ in range(2))
    for i in range(40):
        if i % 5 == 3:
            retired = f"q-{i // 5}"
            looked.retire(retired)
            blind.retire(retired)
            if len(blind.retired) == 7:
                break
        assert looked.peek() == looked.peek()
        assert looked.next() == blind.next() and looked.cursor == blind.cursor


def test_of_what_was_told_the_newest_hundred_are_kept() -> None:
    newest = Newest[int]()
    for item in range(250):
        newest.append(item)
    assert (newest.count, list(newest.kept)) == (250, list(range(150, 250)))
    assert newest.after(0) == newest.after(150) == tuple(range(150, 250))
    assert newest.after(249) == (249,) and newest.after(250) == ()

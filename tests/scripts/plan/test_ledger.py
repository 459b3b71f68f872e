"""Replay's rules by counts of versions, beside replay's own."""

import random
from collections import Counter

import pytest

from replay.ledger.admission import Bounds, choose_batch
from replay.ledger.admission import can_pass as replays_can_pass
from scripts.plan.ledger import Ledger, can_pass
from scripts.plan.scenario import Rules


def test_who_may_be_left_behind_is_as_in_replay() -> None:
    chance, verdicts = random.Random(0), Counter[bool]()
    for _ in range(2000):
        bounds = Bounds(chance.randint(1, 4), chance.randint(0, 4))
        versions = [chance.randint(0, 5) for _ in range(chance.randint(0, 12))]
        step = chance.randint(0, 8)
        wanted = replays_can_pass(versions, step, bounds)
        assert can_pass(Counter(versions), step, bounds) == wanted
        verdicts[wanted] += 1
    assert min(verdicts.values()) > 100


@pytest.mark.parametrize("seed", range(5))
def test_batches_are_those_that_replay_would_choose(seed: int) -> None:
    chance, rules = random.Random(seed), Rules(2, 1, 2)
    ledger, bounds = Ledger(rules), Bounds(2, 2)
    opened, ready, step = [], [], 0
    for _ in range(300):
        if ledger.may_open(step) and chance.random() < 0.6:
            opened.append(ledger.open(step, 1))
        elif opened:
            group = opened.pop(chance.randrange(len(opened)))
            ready.append(group)
            ledger.close(group)
        wanted = choose_batch(
            [(g.version, g.number) for g in ready], [(g.version, g.number) for g in opened],
            step, bounds,
        )  # fmt: skip
        batch = ledger.batch(step)
        assert tuple(sorted(g.number for g in batch or ())) == wanted.group_ids
        assert wanted.oldest == (batch == [])
        if batch:
            ready, step = [g for g in ready if g not in batch], step + 1
    assert step > 20


def test_a_dropped_group_makes_room_for_another() -> None:
    ledger = Ledger(Rules(1, 1, 0))
    group = ledger.open(0, 1)
    assert not ledger.may_open(0)
    ledger.drop(group)
    assert ledger.may_open(0) and ledger.batch(0) is None

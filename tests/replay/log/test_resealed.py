"""Records that were changed and sealed anew, so that no checksum tells: each log is refused by a
named error, or folds into a state that keeps its invariants; the audit reads all of them.
"""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.ledger.ledger import Ledger
from replay.log.format import framed, header
from replay.log.tail import Tail
from replay.protocol import Committed, Evaluate, LogError, Report, Shutdown
from replay.restoring import restore
from scripts.runs.books import Audit
from scripts.runs.record.frames import UnreadableLog
from tests.replay.log.run import SETTINGS, Run
from tests.replay.mutations import changed
from tests.replay.test_fuzz import mutated

COUNTS = [300, pytest.param(20_000, marks=pytest.mark.soak("examples"))]


@pytest.fixture
def payloads(tmp_path: Path, fresh_ledger: Callable, rollout: Callable) -> list[bytes]:
    run = Run(tmp_path / "run.log", fresh_ledger, rollout)
    run.send(Evaluate(1, 0))
    run.train(1, 2, 3)
    run.send(Report(1, 1, {"learner/loss": 1.0}))
    run.send(Committed(1, 2))
    run.send(Shutdown("asked"))
    run.log.close()
    return [payload for _, _, payload in Tail(run.path).pieces()]


def holds(ledger: Ledger, fresh: Callable[..., Ledger]) -> None:
    """Every group is in one place, all are counted, and an image says the same."""
    state = ledger.state
    places = [*state.opened, *state.ready, *state.sampled]
    assert len(places) == len(set(places))
    ended = state.counters.committed + state.counters.dropped.total()
    assert state.counters.opened == len(places) + ended
    again = fresh(SETTINGS)
    again.begin(ledger.image)
    assert sorted(again.image) == sorted(ledger.image), "the same bytes, as sets have no order"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_no_changed_record_breaks_the_fold_or_the_audit(
    tmp_path: Path, payloads: list[bytes], fresh_ledger: Callable[..., Ledger], count: int
) -> None:
    rng, path = random.Random(0), tmp_path / "events.log"
    came: Counter[str] = Counter()
    for number in range(count):
        at = rng.randrange(len(payloads))
        how = mutated if number % 3 == 0 else changed
        other = [*payloads[:at], how(payloads[at], rng), *payloads[at + 1 :]]
        frames = [framed(payload, n) for n, payload in enumerate(other) if payload]
        path.write_bytes(header(0, 0, bytes(16)) + b"".join(frames))
        try:
            ledger = fresh_ledger(SETTINGS)
            restore(ledger, path, lambda *_: None)
        except LogError:
            came["refused"] += 1
        else:
            came["folded"] += 1
            holds(ledger, fresh_ledger)
        books = Audit()
        try:
            books.fold(path)
        except UnreadableLog:
            came["unreadable"] += 1
    assert came["refused"] > count // 4 and came["folded"] > count // 10, came

"""The parts of a batch: all payloads, in order, none beyond its bound but one that is alone; the
same from a replay that was started again.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.ledger import learner
from replay.ledger.events import Event
from replay.log.event_log import read
from replay.parts import cut, joined
from replay.protocol import Batch, BatchPart, Ready, Sample, SamplePart
from tests.replay.log.run import SETTINGS, Run


@given(st.lists(st.binary(max_size=9), max_size=30), st.integers(1, 20))
def test_nothing_is_lost_and_each_part_is_bounded(payloads: list[bytes], most: int) -> None:
    parts = cut(payloads, most)
    assert [payload for part in parts for payload in part] == payloads
    assert all(sum(map(len, part)) <= most or len(part) == 1 for part in parts)
    assert all(parts)


def test_they_are_joined_by_group() -> None:
    assert joined([b"a", b"b", b"c"], (1, 2)) == ((b"a",), (b"b", b"c"))
    with pytest.raises(ValueError, match="2 payloads for groups of 3"):
        joined([b"a", b"b"], (1, 2))


def test_a_replay_that_was_started_again_serves_the_rest_of_them(
    tmp_path: Path, fresh_ledger: Callable, rollout: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "PART_BYTES", 100)
    run = Run(tmp_path / "events.log", fresh_ledger, rollout)
    run.send(Ready("actor-0", 8, 1, 0))
    for lease in run.leases:
        run.deliver(lease)
    batch = run.send(Sample(1, 0))
    assert isinstance(batch, Batch) and batch.parts == 2 and batch.groups == ()
    again = run.new_ledger(SETTINGS)
    again.restore(read(run.path))
    for part in range(2):
        asked = SamplePart(1, 1, part)
        ((_, served),) = again.apply(Event("peer", asked), 2.0).replies
        assert isinstance(served, BatchPart) and served == run.send(asked)

"""No two starts of a learner share a number."""

from pathlib import Path

import pytest

from learner.checkpoint import next_incarnation
from learner.errors import BadCheckpoint


def test_each_start_counts_one_more(tmp_path: Path) -> None:
    assert [next_incarnation(tmp_path / "run") for _ in range(3)] == [1, 2, 3]


def test_a_checkpoint_may_know_of_more(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path, known=7) == 8
    assert next_incarnation(tmp_path, known=7) == 9


def test_a_spoilt_counter_is_named(tmp_path: Path) -> None:
    (tmp_path / "incarnation").write_text("two")
    with pytest.raises(BadCheckpoint, match=r"incarnation: 'two' is not a number"):
        next_incarnation(tmp_path)

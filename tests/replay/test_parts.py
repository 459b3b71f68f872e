"""The parts of a batch: all payloads, in order, none beyond its bound but one that is alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.parts import cut, joined


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

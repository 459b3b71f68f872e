"""The measured pace, the size of a batch, and who is let in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.app.pace import SHARE, Fit, Pace, batch_size, late_s

seconds = st.floats(1e-4, 1.0)


def fitted(*batches: tuple[int, float]) -> Pace:
    fit = Fit()
    for load, took_s in batches:
        fit.add(load, took_s)
    assert fit.pace is not None
    return fit.pace


@given(fixed_s=seconds, each_s=seconds)
def test_a_pace_is_found_again(fixed_s: float, each_s: float) -> None:
    found = fitted(*((n, fixed_s + n * each_s) for n in (1, 64, 8, 256, 30) * 4))
    assert found.seconds(64, 64) == pytest.approx(fixed_s + 64 * each_s, rel=0.1)
    assert found.seconds(256, 256) == pytest.approx(fixed_s + 256 * each_s, rel=0.1)


@given(load=st.integers(1, 256), took_s=seconds)
def test_equal_batches_tell_what_a_query_takes(load: int, took_s: float) -> None:
    found = fitted(*[(load, took_s)] * 5)
    assert found.seconds(load, load) == pytest.approx(took_s, rel=0.1)
    assert found.seconds(2 * load, 2 * load) == pytest.approx(2 * took_s, rel=0.1)


def test_noise_makes_no_pace_negative() -> None:
    found = fitted(*((16 + i % 2, 0.1 if i % 2 else 0.4) for i in range(20)))
    assert found.fixed_s >= 0.0 and found.each_s >= 0.0
    assert 0.1 < found.seconds(16, 16) < 0.4


def test_one_accident_counts_little_and_a_lasting_change_soon() -> None:
    usual = [(10, 0.1)] * 20
    assert fitted(*usual, (10, 30.0)).seconds(10, 10) < 0.2
    assert fitted(*usual, *[(10, 1.0)] * 10).seconds(10, 10) > 0.5


@pytest.mark.parametrize(
    ("pace", "size"),
    [
        (None, 1),  # nothing is known: one query tells
        (Pace(0.0, 0.02), 7),  # 50 a second: .15 s of a deadline of 1.2
        (Pace(0.0, 0.005), 30),
        (Pace(0.0, 1 / 3000), 256),
        (Pace(0.0, 5.0), 1),
        (Pace(2.0, 0.01), 200),  # a batch costs more than its queries: no small ones
        (Pace(0.1, 0.0), 256),
    ],
)
def test_a_batch_takes_a_part_of_the_deadline(pace: Pace | None, size: int) -> None:
    assert batch_size(pace, 1.2, 256) == size


def test_who_would_be_late_is_told_by_how_much() -> None:
    pace = Pace(0.01, 0.005)
    in_time = late_s(pace, running_s=0.1, load=100, batch=25, left_s=1.0)
    assert in_time == pytest.approx(0.1 + 4 * 0.01 + 0.5 - SHARE)
    assert in_time < 0 < late_s(pace, running_s=0.1, load=100, batch=25, left_s=0.5)


@given(pace=st.builds(Pace, seconds, seconds), left_s=st.floats(0.1, 20), load=st.integers(1, 999))
def test_who_is_let_in_is_answered_in_time(pace: Pace, left_s: float, load: int) -> None:
    batch = batch_size(pace, left_s, 256)
    if late_s(pace, 0.0, load, batch, left_s) <= 0.0:
        assert pace.seconds(load, batch) <= SHARE * left_s

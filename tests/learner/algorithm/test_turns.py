"""Credit by turns against the formula."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.turns import step_returns, turn_advantages

returned = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(-2, 2, allow_subnormal=False)), max_size=9
)


@given(st.lists(st.floats(-2, 2), max_size=6), st.floats(0, 1))
def test_a_step_return_is_what_comes_from_there_on(rewards: list[float], discount: float) -> None:
    expected = [
        sum(discount**k * reward for k, reward in enumerate(rewards[t:]))
        for t in range(len(rewards))
    ]
    assert step_returns(rewards, discount) == pytest.approx(expected, abs=1e-9)


@given(returned, st.sampled_from(["none", "group"]))
def test_turns_in_one_state_are_a_group(turns: list[tuple[str, float]], std: str) -> None:
    expected = []
    for state, value in turns:
        same = [other for at, other in turns if at == state]
        scale = statistics.stdev(same) + 1e-6 if std == "group" and len(same) > 1 else 1.0
        centred = value - statistics.fmean(same) if len(set(same)) > 1 else 0.0
        expected.append(centred / scale)
    states, returns = [at for at, _ in turns], [value for _, value in turns]
    assert turn_advantages(states, returns, std) == pytest.approx(expected, rel=1e-6, abs=1e-9)

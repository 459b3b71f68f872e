"""Each rejection against its formula, one sequence at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm.passes import OVER_SEQUENCES
from learner.algorithm.rejection import REJECTIONS, accepted

# Per token: its sequence, both log-probs, the advantage's sign; a behaviour log-prob may be lost.
tokens = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.floats(-6, -0.001),
        st.one_of(st.floats(-6, -0.001), st.just(math.nan)),
        st.sampled_from([-1.0, 0.0, 1.0]),
    ),
    max_size=14,
)


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def naive(name: str, now: float, then: float) -> float:
    x = now - then
    if name.endswith("k2"):
        return x * x / 2
    if name.endswith("k3"):
        return math.exp(x) - 1 - x
    if name == "opsm":
        return -x
    p, q = math.exp(now), math.exp(then)
    return max(binary_kl(p, q), binary_kl(q, p))


def fate(name: str, bound: float, drawn: list[tuple[int, float, float, float]]) -> list[bool]:
    """Whether each token is kept, written out."""
    known = [(row, naive(name, now, then)) for row, now, then, _ in drawn if math.isfinite(then)]
    kept = []
    for row, now, then, advantage in drawn:
        own = [value for other, value in known if other == row] or [0.0]
        if name.startswith("max"):
            value = max(own)
        elif name == "binary_kl":
            value = naive(name, now, then) if math.isfinite(then) else 0.0
        else:
            value = sum(own) / len(own)
        kept.append(value <= bound or (name == "opsm" and advantage >= 0))
    return kept


def ours(name: str, bound: float, drawn: list[tuple[int, float, float, float]]) -> list[bool]:
    rows, now, then, advantages = zip(*drawn, strict=True) if drawn else ((),) * 4
    behaviour = torch.tensor(then, dtype=torch.float64)
    kept = accepted(
        name, bound,
        numerator=torch.tensor(now, dtype=torch.float64, requires_grad=True),
        denominator=behaviour, advantages=torch.tensor(advantages),
        rows=torch.tensor(rows, dtype=torch.int64), usable=behaviour.isfinite(),
    )  # fmt: skip
    return kept.tolist()


@pytest.mark.parametrize("name", REJECTIONS)
@settings(max_examples=40)
@given(drawn=tokens, bound=st.sampled_from([0.01, 0.3, 1.1]))
def test_what_is_left_is_what_the_formula_leaves(
    name: str, drawn: list[tuple[int, float, float, float]], bound: float
) -> None:
    assert ours(name, bound, drawn) == fate(name, bound, drawn)


def test_a_certain_token_has_a_finite_divergence() -> None:
    drawn = [(0, 0.0, -1e-9, 1.0), (1, 0.0, -30.0, 1.0), (2, -30.0, 0.0, 1.0)]
    assert ours("binary_kl", 0.5, drawn) == [True, False, False]


def test_off_policy_masking_spares_what_has_become_likelier_or_did_well() -> None:
    drawn = [(0, -3.0, -1.0, -1.0), (1, -3.0, -1.0, 1.0), (2, -1.0, -3.0, -1.0)]
    assert ours("opsm", 0.5, drawn) == [False, True, True]


def test_only_a_token_s_own_rejection_needs_no_sequence() -> None:
    over = {name for name, each in REJECTIONS.items() if each.over != "token"}
    assert over == OVER_SEQUENCES == REJECTIONS.keys() - {"binary_kl"}


def test_an_unknown_rejection_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learner.rejection = 'veto': one of 'mean_k2', "):
        ours("veto", 1.0, [(0, -1.0, -1.0, 1.0)])

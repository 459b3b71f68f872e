"""The likelihood guard against its formula, span by span."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm.guard import guarded, penalty

Drawn = list[tuple[int, float, float, float]]  # span, current, behaviour, advantage
tokens = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.floats(-4, 0),
        st.one_of(st.floats(-4, 0), st.just(math.nan)),
        st.sampled_from([-1.0, 0.0, 0.5]),
    ),
    max_size=14,
)


def slopes(drawn: Drawn) -> list[float]:
    """The derivative of Σ G by each current log-prob, written out."""
    found = []
    for span, now, then, advantage in drawn:
        own = [
            b - a for other, a, b, credit in drawn
            if other == span and credit >= 0 and math.isfinite(b)
        ]  # fmt: skip
        acts = advantage >= 0 and math.isfinite(then) and math.fsum(own) > 0 and then > now
        found.append(-1.0 if acts else 0.0)
    return found


@settings(max_examples=80)
@given(tokens)
def test_the_gradient_is_the_formula_s(drawn: Drawn) -> None:
    spans, now, then, advantages = zip(*drawn, strict=True) if drawn else ((),) * 4
    current = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor(then, dtype=torch.float64)
    usable = behaviour.isfinite()
    held = guarded(
        current, behaviour, advantages=torch.tensor(advantages),
        spans=torch.tensor(spans, dtype=torch.int64), usable=usable,
    )  # fmt: skip
    safe = torch.where(usable, behaviour, 0.0)
    (held * penalty(current, safe)).sum().backward()
    assert current.grad is not None and current.grad.tolist() == slopes(drawn)


def test_what_has_become_likelier_as_a_whole_is_left_alone() -> None:
    current, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-0.5, -3.0])
    told = {"advantages": torch.ones(2), "usable": torch.ones(2, dtype=torch.bool)}
    one, two = torch.tensor([0, 0]), torch.tensor([0, 1])
    assert guarded(current, behaviour, spans=one, **told).tolist() == [False, False]
    assert guarded(current, behaviour, spans=two, **told).tolist() == [True, False]

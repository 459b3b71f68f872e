"""The lagged average: its closed form, its dtype, and weights lent and given back."""

import json

import pytest
import torch
from torch import Tensor

from configs.runtime.process import REPOSITORY
from learner.model.ema import Ema
from learner.model.shards import Whole

VECTORS = REPOSITORY / "tests" / "vectors" / "losses.json"


class Weights:
    """Something with one trainable tensor."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.nn.Parameter(weight)

    @property
    def shards(self) -> Whole:
        return Whole({"weight": self.weight})

    def set(self, value: Tensor) -> None:
        self.weight.data.copy_(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_closed_form_after_100_updates(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    history = [torch.randn(50).to(dtype) for _ in range(101)]
    engine = Weights(history[0].clone())
    ema = Ema(engine, 0.8)
    for weights in history[1:]:
        engine.set(weights)
        ema.update(engine)
    terms = [0.2 * 0.8 ** (100 - i) * history[i].double() for i in range(1, 101)]
    expected = 0.8**100 * history[0].double() + sum(terms)
    assert ema.master["weight"].dtype == torch.float32
    assert float((ema.master["weight"].double() - expected).abs().max()) < 1e-6


def test_equals_another_systems_step() -> None:
    vectors = json.loads(VECTORS.read_text())["vectors"]
    vector = next(v for v in vectors if v["name"] == "emapg.ema_update")
    reference, actor, expected = (
        torch.tensor(t["data"]).reshape(t["shape"])
        for t in (*vector["inputs"].values(), vector["expected"]["ref"])
    )
    engine = Weights(reference)
    ema = Ema(engine, vector["params"]["tau"])
    engine.set(actor)
    ema.update(engine)
    torch.testing.assert_close(ema.master["weight"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_in_gives_back_the_same_bits_in_the_same_place(dtype: torch.dtype) -> None:
    engine = Weights(torch.randn(20).to(dtype))
    ema = Ema(engine, 0.5)
    engine.set(torch.randn(20))
    own, place = engine.weight.detach().clone(), engine.weight.data_ptr()
    with pytest.raises(KeyError), ema.swapped_in(engine):
        assert torch.equal(engine.weight, ema.master["weight"].to(dtype))
        raise KeyError
    assert torch.equal(engine.weight, own) and engine.weight.data_ptr() == place


def test_the_master_is_a_copy() -> None:
    engine = Weights(torch.zeros(3))
    ema = Ema(engine, 0.9)
    engine.set(torch.ones(3))
    assert not ema.master["weight"].any()


def test_a_decay_of_one_would_never_move() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1.0"):
        Ema(Weights(torch.zeros(1)), 1.0)

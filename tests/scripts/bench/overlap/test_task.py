"""The overlap's model says what the demo's says, and its questions share nothing."""

from collections import Counter

import pytest
import torch

from scripts.bench.overlap.task import deepened, questions
from scripts.demo.start import Recipe, make_model
from scripts.demo.task import COUNTRIES
from scripts.demo.world import make_world


@torch.no_grad()
def test_silent_layers_say_nothing() -> None:
    torch.manual_seed(0)
    model, tokens = make_model(Recipe()).eval(), torch.arange(3, 40)[None]
    deep = deepened(model, 5).eval()
    assert len(deep.model.layers) == 5
    assert torch.equal(deep(tokens).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="layers = 1: the model has 2"):
        deepened(model, 1)


def test_no_two_questions_lead_to_the_same_fact() -> None:
    facts = Counter[str]()
    chains = {c.question: c for hops in (1, 2) for c in make_world(0, COUNTRIES).chains(hops)}
    asked = questions(0)
    for question in asked:
        facts.update(fact.passage for fact in chains[question.text].facts)
    assert len(asked) > 512 and set(facts.values()) == {1}
    assert [question.hops for question in asked[:4]] == [1, 2, 1, 2]

"""Settings of an adapter that would act on nothing, or on what is never adapted, are refused."""

import pytest

from configs.load import ConfigError, parse

RANK = "learner.lora.rank=8"


def test_an_adapter_is_configured() -> None:
    lora = parse("", [RANK, "learner.lora.layers=q_proj"], "test").learner.lora
    assert (lora.scale, lora.layers, lora.publish) == (4.0, ("q_proj",), "adapter")


def test_without_a_rank_the_model_is_trained() -> None:
    assert parse("", [], "test").learner.lora.scale == 0.0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.lora.alpha=16"], "learner.lora.alpha = 16.0 acts on nothing with"),
        (["learner.lora.layers=q_proj"], "learner.lora.layers = .* acts on nothing with"),
        (["learner.lora.publish=merged"], "learner.lora.publish = 'merged' acts on nothing with"),
        ([RANK, "learner.lora.layers=[q_proj,lm_head]"], "names 'lm_head', which is never adapted"),
        ([RANK, "learner.lora.layers=[q_proj,q_proj]"], "'q_proj' is named twice"),
        ([RANK, "learner.lora.layers=['']"], "'' is no name"),
        (["learner.lora.rank=513"], "expected `int` <= 512"),
        ([RANK, "learner.lora.alpha=0"], "expected `float` > 0.0"),
        ([RANK, "learner.lora.publish=both"], "choose one of 'adapter', 'merged'"),
        (["lora.rank=8"], "did you mean 'learner.lora.rank'"),
        (["learner.lora_alpha=8"], "did you mean 'learner.lora.alpha'"),
    ],
)
def test_what_acts_on_nothing_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse("", overrides, "test")

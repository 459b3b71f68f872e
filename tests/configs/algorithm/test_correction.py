"""Settings of the correction, and of averages, that would act on nothing are refused by name."""

import pytest

from configs.load import ConfigError, parse


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ("proximal=behaviour", "objective=reinforce"),
        ("proximal=start_of_update", "objective=reinforce"),
        ("clip_low=0.1", "objective=reinforce"),
        ("ratio_cap=2.0", "objective=cispo"),
        ("proximal_decay=0.8", "proximal=behaviour"),
        ("proximal_decay=0.8", "proximal=start_of_update"),
        ("proximal_decay=0.8", "objective=reinforce"),
        ("anchor_tau=0.5", "anchor=none"),
        ("anchor_tau=0.5", "anchor=frozen"),
        ("anchor_period=3", "anchor=none"),
        ("anchor_period=3", "anchor=frozen"),
        ("constant_length_tokens=9", "reduction=token_mean"),
        ("constant_length_tokens=9", "reduction=sequence_mean"),
        ("behaviour_floor=0.5", "behaviour_weight=none"),
        ("behaviour_floor=0.5", "proximal=behaviour"),
    ],
)
def test_what_acts_on_nothing_is_refused(given: str, because: str) -> None:
    name, _, value = given.partition("=")
    other, _, what = because.partition("=")
    said = f"learner.{name} = '?{value}'? acts on nothing with learner.{other} = '{what}': set it"
    with pytest.raises(ConfigError, match=said):
        parse("", [f"learner.{given}", f"learner.{because}"], "test")


def test_a_length_without_its_reduction_is_refused() -> None:
    with pytest.raises(ConfigError, match="constant_length_tokens = 9 acts on nothing with"):
        parse("", ["learner.constant_length_tokens=9"], "test")


@pytest.mark.parametrize(
    "words",
    [
        "objective=reinforce proximal=ema proximal_decay=0.5",  # defaults may stand
        "anchor=frozen anchor_tau=0.9 anchor_period=10 kl_coef=0.1",
        "proximal=behaviour behaviour_weight=mask behaviour_floor=0.5",
        "objective=reinforce behaviour_floor=0.5",
        "anchor=ema anchor_tau=0.5 anchor_period=3",
        "reduction=constant_length constant_length_tokens=9",
    ],
)
def test_what_acts_is_taken(words: str) -> None:
    parse("", [f"learner.{word}" for word in words.split()], "test")

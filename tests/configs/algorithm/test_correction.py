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
        ("clip_low=0.1", "proximal=start_of_update"),
        ("clip_high=0.1", "proximal=start_of_update"),
        ("ratio_cap=2.0", "proximal=start_of_update"),
        ("behaviour_level=sequence", "proximal=behaviour"),
        ("behaviour_cap=5.0", "proximal=behaviour"),
        ("behaviour_weight=none", "proximal=behaviour"),
        ("behaviour_level=geometric", "behaviour_weight=none"),
        ("behaviour_cap=5.0", "behaviour_weight=none"),
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
    ("objective", "field"),
    [("gspo", "clip_low"), ("gspo", "ratio_cap"), ("cispo", "clip_high"), ("dppo_tv", "ratio_cap")],
)
def test_a_bound_on_a_ratio_of_1_is_refused(objective: str, field: str) -> None:
    given = [f"learner.objective={objective}", "learner.proximal=start_of_update"]
    with pytest.raises(ConfigError, match=f"learner.{field} = 3.0 .* = 'start_of_update': set it"):
        parse("", [*given, f"learner.{field}=3"], "test")


KL = "anchor=frozen kl_coef=0.1"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (f"proximal=behaviour {KL} kl_weight=none behaviour_cap=5", "behaviour_cap = 5.0"),
        (f"proximal=behaviour {KL} kl_in=reward behaviour_cap=5", "behaviour_cap = 5.0"),
        (
            f"proximal=behaviour {KL} kl_top_k=8 kl_tail=false behaviour_cap=5",
            "behaviour_cap = 5.0",
        ),
        (f"proximal=behaviour {KL} behaviour_level=sequence", "behaviour_level = 'sequence'"),
        (f"behaviour_weight=none {KL} kl_weight=none behaviour_cap=5", "behaviour_cap = 5.0"),
        (f"behaviour_weight=none {KL} kl_in=reward behaviour_level=sequence", "behaviour_level = "),
    ],
)
def test_what_would_act_on_a_weighted_kl_alone_is_refused_without_one(
    words: str, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"learner.{name}.* acts on nothing with learner"):
        parse("", [f"learner.{word}" for word in words.split()], "test")


@pytest.mark.parametrize(
    "words",
    [
        "objective=reinforce proximal=ema proximal_decay=0.5",  # defaults may stand
        "anchor=frozen anchor_tau=0.9 anchor_period=10 kl_coef=0.1",
        "proximal=behaviour behaviour_weight=mask behaviour_floor=0.5",
        "objective=reinforce behaviour_floor=0.5",
        "proximal=behaviour behaviour_weight=mask behaviour_level=sequence behaviour_cap=5",
        "proximal=start_of_update objective=dppo_tv clip_low=0.1 clip_high=0.1",
        f"proximal=behaviour {KL} behaviour_cap=5",
        f"proximal=behaviour {KL} kl_top_k=8 behaviour_cap=5",
        f"behaviour_weight=none {KL} behaviour_level=sequence behaviour_cap=5",
        "anchor=ema anchor_tau=0.5 anchor_period=3",
        "reduction=constant_length constant_length_tokens=9",
    ],
)
def test_what_acts_is_taken(words: str) -> None:
    parse("", [f"learner.{word}" for word in words.split()], "test")

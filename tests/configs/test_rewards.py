"""The section `rewards`: contradictions are refused by name, and sound settings are taken."""

import pytest

from configs.load import ConfigError, differences, dump, parse
from configs.schema import Config

JUDGE = ["rewards.weights.judge=1", "rewards.judge.url=http://h/v1", "rewards.judge.model=m"]
SEARCH_R1 = ["rewards.mode=search_r1"]


def loaded(*overrides: str) -> Config:
    return parse("", overrides, "test")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rewards.weights.emm=1"], ["rewards.weights.emm", "did you mean 'rewards.weights.em'"]),
        (["rewards.weights.f1=-1"], ["rewards.weights.f1", "-1", ">= 0"]),
        (["rewards.weights.f1=.inf"], ["rewards.weights.f1", "inf", "finite"]),
        (["rewards.weights.em=0"], ["rewards.weights", "all 0", "f1", "custom"]),
        (["rewards.weights={em: 0, search_cost: 1}"], ["rewards.weights", "all 0"]),
        (JUDGE[:1], ["rewards.weights.judge = 1.0", "rewards.judge.url"]),
        (JUDGE[:2], ["rewards.weights.judge = 1.0", "rewards.judge.model"]),
        (JUDGE[1:], ["rewards.judge.url = 'http://h/v1'", "nothing", "rewards.weights.judge"]),
        (["rewards.judge.url=h:8000/v1"], ["rewards.judge.url", "h:8000/v1", "http://"]),
        (["rewards.judge.url=http://"], ["rewards.judge.url", "base URL"]),
        (["rewards.judge.prompt=Right? {answer}"], ["rewards.judge.prompt", "{question}"]),
        (["rewards.judge.timeout_s=0"], ["rewards.judge.timeout_s", "0", "> 0"]),
        (["rewards.weights.similarity=1"], ["weights.similarity", "rewards.similarity.model"]),
        (["rewards.similarity.model=/m"], ["'/m'", "nothing", "rewards.weights.similarity"]),
        (["rewards.weights.custom=1"], ["rewards.weights.custom", "rewards.custom"]),
        (["rewards.custom=mine:reward"], ["'mine:reward'", "rewards.weights.custom"]),
        (["rewards.custom=mine"], ["rewards.custom = 'mine'", "package.module:function"]),
        (["rewards.mode=strikt"], ["rewards.mode", "strikt", "'strict'", "'search_r1'"]),
        ([*SEARCH_R1, "rewards.weights.f1=1"], ["weights.f1 = 1.0", "'search_r1'", "'strict'"]),
        ([*SEARCH_R1, "rewards.weights.em=2"], ["weights.em = 2.0", "'search_r1'"]),
        ([*SEARCH_R1, *JUDGE], ["weights.judge = 1.0", "'search_r1'"]),
        (["rewards.search_r1.version=v0.3"], ["search_r1.version", "'v0.3'", "'strict'"]),
        ([*SEARCH_R1, "rewards.search_r1.structure=0.1"], ["structure", "0.1", "'v0.2'"]),
    ],
)
def test_what_cannot_be_is_named(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(*overrides)
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        JUDGE,
        ["rewards.weights={em: 0, f1: 1, format: 0.2, search_cost: 0.01}"],
        ["rewards.custom=my.rewards:reward", "rewards.weights.custom=0.5"],
        [*SEARCH_R1, "rewards.search_r1={version: v0.3, structure: 0.2, retrieval: 0.1}"],
        [*SEARCH_R1, "rewards.search_r1.final=0.1"],
    ],
)
def test_sound_settings_survive_their_file(overrides: list[str]) -> None:
    config = loaded(*overrides)
    assert parse(dump(config), [], "again") == config


def test_a_run_goes_on_where_the_key_lies_elsewhere_but_under_no_other_reward() -> None:
    recorded = loaded(*JUDGE)
    assert not differences(recorded, loaded(*JUDGE, "rewards.judge.key_file=/other"))
    assert "rewards.weights.f1" in differences(recorded, loaded(*JUDGE, "rewards.weights.f1=1"))

"""The environment's section refuses what could not be meant."""

import pytest

from configs.load import ConfigError, parse


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("environment.name=rga", ["'rga'", "search_r1, tool_call, no_search, rag", "package.mod"]),
        (
            "environment.tools=[calculator]",
            ["environment.tools", "'calculator'", "package.module:"],
        ),
        ("environment.budget_template=left", ["environment.budget_template", "{searches}"]),
        ("environment.force_template=now", ["environment.force_template", "end with <answer>"]),
        ("environment.queries_per_turn=0", ["environment.queries_per_turn", "0"]),
        ("environment.queries_per_turn=65", ["environment.queries_per_turn", "65", "64"]),
        ("environment.tell_budgets=true", ["did you mean 'environment.tell_budget'"]),
    ],
)
def test_each_fault_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse("", [override], "here")
    assert all(word in str(raised.value) for word in words)


def test_a_programs_time_is_not_above_its_uses() -> None:
    short = "environment.tool_deadline_s=10"
    with pytest.raises(
        ConfigError, match=r"python\.wall_s = 20 .*environment\.tool_deadline_s = 10"
    ):
        parse("", ["environment.tools=[python]", short], "here")
    assert parse("", [short], "here").environment.python.wall_s == 20.0


def test_ones_own_are_named_as_entry_points() -> None:
    overrides = ["environment.name=my.games:Guess.easy", "environment.tools=[my_tools:calc]"]
    settings = parse("", overrides, "here").environment
    assert (settings.name, settings.tools) == ("my.games:Guess.easy", ("my_tools:calc",))

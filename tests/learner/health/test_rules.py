"""Each rule fires on gauges that go wrong in its way, and on no others.

The series here are made by formulas and noise of a fixed seed. Those in `recorded.json` are of real
runs. Of fleets: `wiki` on the wiki task, `fleet` on the demo task, to EM .81 in 40 steps.
Of the demo task in one process (`StaleRun`, seed 0, 8 groups a step, constant rate): `healthy` at
staleness 2, `rate` with eight times the rate, `stale` at staleness 16 without any correction. The
others are those of `tests/learner/health/record.py`, which makes them.
"""

import json
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from configs.sentinels import SentinelsConfig
from learner.health.rules import RULES, Announcer, Rule, gauge_of, median_of, reward_of, said
from learner.health.sentinels import Series

Gauges = dict[str, float]
STEPS, TURN = 60, 25  # and the first step that goes wrong
# Medians of the demo's run and of the wiki's, and what they scatter by.
HEALTHY = {
    "learner/current_ess": (0.97, 0.02),
    "learner/mismatch": (0.004, 0.003),
    "learner/entropy": (0.6, 0.1),
    "learner/grad_norm": (0.5, 0.3),
    "learner/likelihood_change_positive": (0.02, 0.02),
    "replay/no_signal_fraction": (0.5, 0.2),
    "learner/repeated_queries": (0.05, 0.05),
    "learner/empty_searches": (0.02, 0.02),
    "learner/searches_per_rollout": (1.5, 0.2),
    "learner/malformed_fraction": (0.08, 0.05),
    "learner/repetition": (0.05, 0.03),
    "learner/limit_fraction": (0.1, 0.05),
    "actor/reward": (0.4, 0.1),
}
WRONG: dict[str, Callable[[int], float]] = {  # by steps since TURN
    "ess": lambda n: 0.97 * 0.9**n,
    "mismatch": lambda n: 0.004 + 0.02 * n,
    "entropy": lambda n: 0.6 * 0.8**n,
    "grad_norm": lambda n: 0.5 * 1.3**n,
    "likelihood": lambda n: -0.03 * n,
    "no_signal": lambda n: min(1.0, 0.5 + 0.05 * n),
    "repeated_queries": lambda n: min(0.8, 0.05 + 0.04 * n),
    "empty_searches": lambda n: 1.0,
    "searches": lambda n: 1.5 * 0.8**n,
    "malformed": lambda n: min(0.9, 0.08 + 0.05 * n),
    "repetition": lambda n: min(0.9, 0.05 + 0.04 * n),
    "truncation": lambda n: min(0.9, 0.1 + 0.05 * n),
}


def healthy(seed: int) -> list[Gauges]:
    rng = random.Random(seed)
    return [
        {name: rng.gauss(middle, spread) for name, (middle, spread) in HEALTHY.items()}
        for _ in range(STEPS)
    ]


def gone_wrong(name: str, seed: int = 0) -> list[Gauges]:
    steps = healthy(seed)
    gauge = RULES[name].gauge
    for step, gauges in enumerate(steps[TURN:]):
        gauges[gauge] = WRONG[name](step)
    return steps


def firing(steps: list[Gauges]) -> dict[str, list[int]]:
    """The steps, from 1, at which each rule fires."""
    series = {name: Series(rule) for name, rule in RULES.items()}
    found: dict[str, list[int]] = {}
    for step, gauges in enumerate(steps, 1):
        for name, each in series.items():
            if each.take(step, gauges):
                found.setdefault(name, []).append(step)
    return found


def test_each_field_of_the_section_is_a_rule() -> None:
    *fields, rate, bound = SentinelsConfig.__struct_fields__
    assert fields == list(RULES) == list(WRONG) and (rate, bound) == ("rollback_rate", "rollbacks")


@pytest.mark.parametrize("seed", range(20))
def test_none_fires_on_a_healthy_run(seed: int) -> None:
    assert firing(healthy(seed)) == {}


@pytest.mark.parametrize("name", RULES)
def test_each_fires_on_a_run_that_goes_wrong_in_its_way_and_no_other_does(name: str) -> None:
    found = firing(gone_wrong(name))
    assert list(found) == [name]
    assert TURN < found[name][0] <= TURN + 25 and found[name][-1] == STEPS


@pytest.mark.parametrize("name", RULES)
def test_one_odd_step_is_no_sign(name: str) -> None:
    steps = healthy(0)
    gauge = RULES[name].gauge
    steps[TURN][gauge] = 1e9 if RULES[name].side == "above" else -1e9
    assert firing(steps) == {}


def test_a_rule_is_silent_until_its_window_is_full_and_its_warm_up_over() -> None:
    plain = Rule("g", "above", 1.0, "", "", window=3)
    assert [plain.fires([2.0] * count) for count in range(5)] == [False, False, False, True, True]
    grown = Rule("g", "above", 2.0, "", "", 2, warm_up=3)
    assert not grown.fires([1.0, 1.0, 9.0, 5.0]) and grown.fires([1.0, 1.0, 9.0, 5.0, 5.0])
    assert not grown.fires([1.0, 1.0, 9.0, 2.0, 2.0])


RELATIVE = [name for name, rule in RULES.items() if rule.warm_up]


def told(name: str, values: list[float | None]) -> list[bool]:
    """The verdicts of a rule on one value a step; None: a step without the gauge."""
    series, gauge = Series(RULES[name]), RULES[name].gauge
    return [
        series.take(step, {} if value is None else {gauge: value})
        for step, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize("name", RELATIVE)
def test_zeros_of_a_cold_start_are_no_measure_of_what_is_usual(name: str) -> None:
    rule = RULES[name]
    start = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.4, 0.0, 0.5, 0.0, 0.6]
    assert not any(told(name, [*start, *[0.5] * 60]))
    wrong = 0.5 * rule.limit * (2.0 if rule.side == "above" else 0.5)
    assert told(name, [*start, *[0.5] * 7, *[wrong] * rule.window])[-1]


@pytest.mark.parametrize("name", RELATIVE)
def test_without_a_usual_value_there_is_no_bound(name: str) -> None:
    rule = RULES[name]
    for usual in (0.0, -0.5):
        assert rule.bound([usual] * rule.warm_up) is None
        assert not any(told(name, [*[usual] * 30, *[5.0] * 8]))


@pytest.mark.parametrize("name", RULES)
def test_a_step_without_the_gauge_changes_no_verdict(name: str) -> None:
    values = [gauges[RULES[name].gauge] for gauges in gone_wrong(name)]
    verdicts = told(name, [each for value in values for each in (value, None, None)])
    assert verdicts == [verdict for verdict in told(name, values) for _ in range(3)]
    assert verdicts[-1] and sum(a != b for a, b in pairwise(verdicts)) == 1


@pytest.mark.parametrize("name", ["entropy", "no_signal"])
def test_a_policy_that_earns_nearly_all_may_be_sure(name: str) -> None:
    steps = gone_wrong(name)
    for gauges in steps[TURN:]:
        gauges["actor/reward"] = 0.97
    assert firing(steps) == {}


def test_the_reward_is_of_all_rollouts_else_of_those_trained() -> None:
    assert reward_of({"learner/reward": 0.5, "actor/reward": 0.9}) == 0.9
    assert reward_of({"learner/reward": 0.5}) == 0.5
    assert reward_of({}) is None


def test_what_is_said_names_gauge_value_bound_and_remedy() -> None:
    line = said("grad_norm", 31, 7.25)
    assert line.startswith("sentinel grad_norm at step 31: ")
    assert "(learner/grad_norm at 7.25, above 10 times its first 10 over 5 steps)" in line
    assert "lower learner.lr" in line
    assert "nearly stopped to search (below 0.2 times" in said("searches", 31, None)


def test_the_page_has_each_rule_with_its_gauge_and_bound() -> None:
    page = (REPOSITORY / "docs" / "sentinels.md").read_text()
    told = {
        row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| `(\S+)` \| ([^|,]+)", page, re.M)
    }
    assert list(told) == list(RULES)
    for name, rule in RULES.items():
        gauge, bound = told[name]
        side, number, *times = bound.split()
        assert (gauge, side) == (rule.gauge, rule.side)
        assert float(number.replace("−", "-")) == rule.limit
        assert bool(times) == bool(rule.warm_up)
        reward = re.search(rf"^\| `{name}` .*, reward at most ([\d.]+) \|", page, re.M)
        assert (float(reward[1]) if reward else None) == rule.rewarded
        also = f", reward at most {rule.rewarded}" if reward else ""
        assert rule.condition.endswith(f"over {rule.window} steps{also}")
    assert "Both bounds assume that the best reward is 1" in page


def test_it_is_said_when_one_begins_to_fire() -> None:
    announcer = Announcer()
    fires, rests = {gauge_of("ess"): 1.0}, {gauge_of("ess"): 0.0}
    counts = [len(announcer.lines(n, g)) for n, g in enumerate((rests, fires, fires, rests, fires))]
    assert counts == [0, 1, 0, 0, 1]
    (line,) = Announcer().lines(9, fires | {median_of("ess"): 0.7, "learner/current_ess": 0.95})
    assert "(learner/current_ess at 0.7, below 0.8 over 10 steps)" in line


def recorded(name: str) -> list[Gauges]:
    """The gauges of each step of a run on record."""
    runs = json.loads(Path(__file__).with_name("recorded.json").read_text())
    columns = runs[name].items()
    steps = range(max(len(values) for _, values in columns))
    return [{g: v[step] for g, v in columns if v[step] is not None} for step in steps]


@pytest.mark.parametrize(
    "name", ["healthy", "healthy-0", "healthy-1", "healthy-2", "wiki", "fleet"]
)
def test_none_fires_on_record_of_a_run_that_learns(name: str) -> None:
    assert firing(recorded(name)) == {}


@pytest.mark.parametrize(
    ("name", "fires"),
    [
        ("rate", {"ess": 10, "likelihood": 11, "malformed": 16, "truncation": 15}),
        ("stale", {"ess": 12}),
        ("values", {"ess": 10, "likelihood": 11, "grad_norm": 23}),
        ("nothing", {"no_signal": 10, "empty_searches": 10, "malformed": 10}),
        ("searches", {"truncation": 26}),
        ("words", {"truncation": 19, "malformed": 23, "repetition": 46, "searches": 51}),
        ("guesses", {"searches": 20, "no_signal": 25}),
        ("sameness", {"searches": 20, "entropy": 42, "no_signal": 52}),
        ("repeats", {"truncation": 24, "repeated_queries": 44}),
    ],
)
def test_what_fires_on_record_of_a_run_that_goes_wrong(name: str, fires: dict[str, int]) -> None:
    """Each with the first step."""
    assert {rule: steps[0] for rule, steps in firing(recorded(name)).items()} == fires

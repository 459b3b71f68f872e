"""The health of a run is told as its sentinels judged it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from configs.load import parse, save
from configs.schema import Config, ReplayConfig
from learner.health.rollback import Rollback
from learner.health.sentinels import FILE_NAME, Noted
from replay.log.records import Reported
from scripts.view.health import health
from scripts.view.index import Index
from tests.scripts.conftest import RecordedRun


def noted(run: Path, lines: Iterable[Noted]) -> None:
    (run / FILE_NAME).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))


def of_rule(index: Index, name: str) -> dict[str, Any]:
    """What is told of a rule in the only run."""
    (rule,) = [each for each in health(index)["rules"] if each["name"] == name]
    (found,) = rule["runs"]
    return dict(found)


def test_a_bound_after_a_rollback_is_the_one_that_is_judged_by(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    replay = ReplayConfig(max_staleness=2)
    save(Config(run_dir=str(recorded_run.path), replay=replay), recorded_run.path / "config.yaml")
    back = Rollback(step=10, since=1, to=0, rule="ess", scale=0.5)
    norms = [20.0] * 12 + [0.5] * 20
    lines = [
        Noted(step, {"learner/grad_norm": norm}, (), back if step == 10 else None)
        for step, norm in enumerate(norms, 1)
    ]
    noted(recorded_run.path, lines[:11])
    index = index_of(recorded_run.path)
    assert of_rule(index, "grad_norm")["bound"] is None
    noted(recorded_run.path, lines)
    assert of_rule(index, "grad_norm")["bound"] == 5.0
    assert of_rule(index, "grad_norm")["values"] == norms


def test_the_rollouts_that_are_shown_are_those_that_had_a_rule_fire(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    recorded_run.train(0)
    for step, at in ((1, 10.0), (2, 20.0), (3, 30.0)):
        recorded_run.append(Reported(at, 1, step, {}))
    fired = ("no_signal", "ess", "repeated_queries", "truncation")
    noted(recorded_run.path, [Noted(step, {}, fired if step != 3 else ()) for step in range(1, 6)])
    index = index_of(recorded_run.path)
    asked = {"run": "0", "kind": "train"}
    assert of_rule(index, "no_signal")["asked"] == asked | {"steps": "1-2,4-5"}  # none is dropped
    replay = ReplayConfig(drop_no_signal=True)
    save(Config(run_dir=str(recorded_run.path), replay=replay), recorded_run.path / "config.yaml")
    steps = asked | {"steps": "1-2,4-5"}
    assert of_rule(index, "ess")["asked"] == steps
    assert of_rule(index, "repeated_queries")["asked"] == steps | {"which": "repeated"}
    assert of_rule(index, "truncation")["asked"] == steps | {"which": "limit"}
    assert of_rule(index, "malformed")["asked"] == {}
    dropped = asked | {"time_from": "30.000", "time_to": "30.000", "which": "dropped"}
    assert of_rule(index, "no_signal")["asked"] == dropped  # when it last fired; 5 is not reported
    noted(recorded_run.path, [Noted(step, {}, ("no_signal",)) for step in (2, 3)])
    earlier = {"time_from": "10.000", "time_to": "30.000"}
    assert of_rule(index, "no_signal")["asked"] == dropped | earlier
    noted(recorded_run.path, [Noted(step, {}, ("ess",)) for step in range(0, 4000, 2)])
    spans = of_rule(index, "ess")["asked"]["steps"].split(",")
    assert len(spans) == 1000 and spans[-1] == "3998"


def test_a_rule_is_off_that_says_nothing_of_this_run(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    index = index_of(recorded_run.path)
    for baseline, action in (("mean", "warn"), ("critic", "off"), ("none", "off")):
        config = parse("", [f"learner.baseline={baseline}", "learner.advantage_std=none"], "")
        save(config, recorded_run.path / "config.yaml")
        assert of_rule(index, "no_signal")["action"] == action
        assert of_rule(index, "ess")["action"] == "warn"


def test_of_very_many_steps_some_are_told(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    lines = (Noted(step, {"learner/current_ess": 0.5}) for step in range(12_000))
    noted(recorded_run.path, lines)
    found = of_rule(index_of(recorded_run.path), "ess")
    assert found["steps"] == list(range(0, 12_000, 3)) and found["values"] == [0.5] * 4000

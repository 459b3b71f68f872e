"""The health of a run is told as its sentinels judged it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from configs.load import save
from configs.schema import Config, ReplayConfig
from learner.health.rollback import Rollback
from learner.health.sentinels import FILE_NAME, Noted
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

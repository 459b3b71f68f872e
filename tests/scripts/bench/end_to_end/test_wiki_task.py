"""`forage bench end-to-end --task wiki` on a made-up world: its files, and a tiny model's cells."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.runtime.files import write_json
from scripts import cli
from scripts.bench.end_to_end.bench import OF_A_CELL
from scripts.bench.end_to_end.task import TASKS, WIKI
from scripts.wiki.pipeline import pipeline, settings, start
from scripts.wiki.wiki import WikiFiles, build
from tests.scripts.wiki.pipeline.tiny import FEW, lengthened
from tests.scripts.wiki.small import packaged


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WikiFiles]:
    """The task's files of seed 0, but for a model, where the command looks for them."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(pipeline, "CACHE", cache)
    with packaged(cache):
        yield build(cache, 0, lambda line: None)


def started(files: WikiFiles) -> Path:
    """A start of 8 steps put on record, as `forage demo wiki` leaves it; its model."""
    plan = pipeline.planned(settings.WikiOptions(0), files, pipeline.CACHE, start.Recipe())
    model = plan.start / start.WARM / "model"
    shutil.copytree(files.model, model)
    write_json(plan.start / start.CHOICE, start.Choice(8, [start.Candidate(8, 0.25, 60.0)]))
    return model


def test_it_is_the_start_s_policy_where_there_is_one(
    files: WikiFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "check_machine", lambda options: None)
    files.model.mkdir()
    told: list[str] = []
    found = WIKI.files(0, (), told.append)
    assert (found.model, found.settled) == (files.model, files.model)
    assert (found.train, found.eval, found.passages) == (files.train, files.eval, files.index)
    assert WIKI.made_of(0) == "model as it comes"
    model = started(files)
    assert WIKI.files(0, (), told.append) == dataclasses.replace(found, model=model, settled=model)
    assert WIKI.made_of(0) == f"{model.parent.parent.name}, 8 steps"
    assert told == [f"from {files.model}", f"from {model}"]


@pytest.mark.soak("benchmarks")
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_tiny_model_is_measured(
    files: WikiFiles, spelling_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "wiki", dataclasses.replace(WIKI, window=(2.0, 5.0)))
    lengthened(spelling_model_path, files.model)
    model, figures = started(files), tmp_path / "figures.json"
    words = ["bench", "end-to-end", "--task", "wiki", "--modes", "sync", "async_2", "--steps", "2"]
    words += ["--out", str(tmp_path / "out"), "--json", str(figures)]
    words += [each for each in FEW if each.partition("=")[0] not in OF_A_CELL]
    words += ["replay.groups_per_step=2"]  # some rollouts end in any two steps
    assert cli.main(words) == 0
    found = json.loads(figures.read_text())
    assert found["task"] == "wiki" and found["left"] == []
    assert found["made_of"] == {"0": f"{model.parent.parent.name}, 8 steps"}
    assert found["rivals"]["async_over_overlapped"] == {"measured": ["sync"], "missing": []}
    assert found["rivals"]["async_over_lockstep"] == {"measured": [], "missing": ["lockstep"]}
    rows = {row["mode"]: row for row in found["rows"]}
    assert [*rows] == ["sync", "async_2"] and {row["latency"] for row in found["rows"]} == {"tail"}
    pace = rows["async_2"]["tokens_per_s"] / rows["sync"]["tokens_per_s"]
    assert found["async_over_overlapped"] == pytest.approx(pace)
    assert found["async_over_ideal"] > 0.0 and found["async_over_lockstep"] is None
    assert rows["sync"]["staleness_max"] == 0.0 and rows["async_2"]["staleness_max"] <= 2.0
    assert found["parts"]["0"]["tokens_per_s"] > 0.0 and found["parts"]["0"]["update_s"] > 0.0
    assert (tmp_path / "out" / "wiki.png").stat().st_size > 0

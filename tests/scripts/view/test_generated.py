"""A generated run is one: its books close, and the pages' index has all of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.runs.books import Audit
from scripts.view.index import Index
from scripts.view.rollouts.wanted import Wanted
from scripts.view.timeline import timeline
from tests.scripts.view.generated import GeneratedRun


def test_a_generated_run_has_closed_books_and_is_read_whole(
    tmp_path: Path, bpe_tokenizer: Any, index_of: Callable[..., Index]
) -> None:
    run = GeneratedRun(tmp_path / "run", bpe_tokenizer)
    run.write(1)
    books = Audit()
    books.fold(run.path / "events.log")
    assert books.faults == []
    index = index_of(run.path)
    count, rows = index.rollouts(Wanted(), 0, 100)
    assert count == run.delivered > 200 and index.runs[0].step == run.trained == 1
    assert index.runs[0].follower.damage == "" and len({row["actor"] for row in rows}) > 1
    lanes = timeline(index, 0, None, None)["lanes"]
    assert sum(lane["kind"] == "engine" and lane["busy"]["mean"] > 0 for lane in lanes) > 1

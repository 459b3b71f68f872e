"""The restart's benchmark at a tiny size: a real log that grows, and a replay that comes back."""

from pathlib import Path

import pytest

from replay.log.event_log import FILE_NAME
from replay.log.snapshots import snapshots
from scripts.bench.stream.restart import measure_restarts
from scripts.runs.books import Audit


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replay_comes_back_on_a_log_that_grows(tmp_path: Path) -> None:
    rows = measure_restarts((512, 1024), tmp_path, lambda text: None, tail=500)
    assert rows[0]["rollouts"] >= 512 and rows[1]["rollouts"] >= 1024
    assert rows[1]["records"] > rows[0]["records"] > 500 and rows[1]["restart_s"] > 0
    audit = Audit()
    audit.fold(tmp_path / FILE_NAME)
    assert audit.faults == [] and audit.summary()["replay_restarts"] == 3
    assert list(snapshots(tmp_path / FILE_NAME))

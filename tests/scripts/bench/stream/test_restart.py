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
    def cut_off(text: str) -> None:
        if "2,048" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_restarts((512, 1024, 2048), tmp_path, cut_off, tail=500)
    (folder,) = tmp_path.glob("log-*")
    audit = Audit()
    audit.fold(folder / FILE_NAME)
    assert audit.faults == [] and audit.summary()["replay_restarts"] == 7
    assert list(snapshots(folder / FILE_NAME))
    rows = measure_restarts((512, 1024), tmp_path, lambda text: None, tail=500)
    assert rows[0]["rollouts"] >= 512 and rows[1]["rollouts"] >= 1024
    assert rows[1]["records"] > rows[0]["records"] > 500 and rows[1]["restart_s"] > 0
    assert list(tmp_path.iterdir()) == []  # the rows were on file; all is there

"""The real clients, offline: what a run and its resumption write, read back from their files.

They are installed once, into a folder of their own, and belong to no lock.
"""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.load import parse
from configs.runtime.files import making
from configs.runtime.process import REPOSITORY
from learner.metrics.metrics import Metrics

CLIENTS = (
    "wandb==0.31.0", "cwevals==0.0.1b1", "distro==1.9.0", "xxhash==4.1.0",
    "trackio==0.43.0", "gradio_client==2.7.2", "brotli==1.2.1", "orjson==3.13.0", "pillow==12.3.0",
)  # fmt: skip
SITE = REPOSITORY / ".cache" / f"trackers-{sys.version_info.minor}-{CLIENTS[0]}-{CLIENTS[4]}"
BLOCK = 32768  # of a log of LevelDB's, in which wandb keeps its records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a run whose trackers reach nothing but files below the folder."""
    if not SITE.is_dir():
        install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target")
        with making(SITE) as draft:
            subprocess.run([*install, str(draft), *CLIENTS], check=True)
    for name, value in {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(SITE)]),
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "hunter2" * 6,
        "WANDB_CONFIG_DIR": str(tmp_path / "settings"),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_a_run_and_its_resumption_are_one_run(offline: Path) -> None:
    run_dir = offline / "first"
    run_dir.mkdir()
    asked = ["learner.trackers=[wandb,trackio]", "learner.tracker_deadline_s=120"]
    config = parse("", [*asked, "learner.tracker_project=mine", "seed=7"], "")
    for resumed, steps in ((None, (1, 2)), (3, (3, 1))):
        with Metrics(run_dir, resumed, config) as metrics:
            for step in steps:
                metrics.write(step, {"learner/loss": step / 4, "eval/nq/em": 0.5})
        assert set(metrics.gauges().values()) == {0.0}

    wandb = [list(records(path)) for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))]
    runs = [next(record.run for record in found if record.HasField("run")) for found in wandb]
    id = json.loads((run_dir / "tracker.json").read_text())
    assert [(run.run_id, run.project, run.display_name) for run in runs] == [
        (id, "mine", "first")
    ] * 2
    told = {
        "/".join(each.nested_key) or each.key: each.value_json for each in runs[0].config.update
    }
    assert told["seed"] == "7"
    points = [history(record) for found in wandb for record in found if record.HasField("history")]
    assert [(point["step"], point["learner/loss"]) for point in points] == [
        (1, 0.25), (2, 0.5), (3, 0.75), (1, 0.25)
    ]  # fmt: skip

    with sqlite3.connect(offline / "trackio" / "mine.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics").fetchall()
    database.close()
    assert len({run_id for run_id, *_ in rows}) == 1
    assert [(name, step, json.loads(text)["learner/loss"]) for _, name, step, text in rows] == [
        (f"first-{id}", step, step / 4) for step in (1, 2, 3, 1)
    ]
    kept = [path for path in offline.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"hunter2" in path.read_bytes()], "a key was written"


def records(path: Path) -> Iterator[Any]:
    """The records of a file of wandb's, decoded by its own messages."""
    sys.path.append(str(SITE))
    try:
        from wandb.proto import wandb_internal_pb2
    finally:
        sys.path.remove(str(SITE))
    content, at, whole = path.read_bytes(), 7, b""  # behind the file's own header
    while at < len(content):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(record: Any) -> dict[str, float]:
    items = record.history.item
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items}

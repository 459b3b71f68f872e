"""The wall clock steps back while replay is down: groups still grow old, and no record precedes
another.
"""

import threading
import time
from pathlib import Path

import msgspec

from configs.load import dump
from configs.schema import Config, ReplayConfig
from replay.log.event_log import FILE_NAME, EventLog, read_whole
from replay.log.records import GroupDropped, GroupOpened, LearnerResumed, RunStarted
from replay.worker import make_server
from tests.replay.conftest import new_ledger

AHEAD_S = 3600.0


def test_a_group_opened_in_the_future_is_past_its_deadline_in_time(tmp_path: Path) -> None:
    limits = {"group_deadline_s": 0.2, "dead_after_s": 0.2, "restart_deadline_s": 0.2}
    replay = msgspec.convert({"endpoint": f"ipc://{tmp_path}/replay"} | limits, ReplayConfig)
    config, path = Config(run_dir=str(tmp_path), replay=replay), tmp_path / FILE_NAME
    then, question = time.time() + AHEAD_S, new_ledger(config).state.questions.first()
    began = [
        RunStarted(then, config.seed, dump(config)),
        LearnerResumed(then, 1, 0),
        GroupOpened(then, 1, "train", question, 1, 0),
    ]
    ledger = new_ledger(config)
    ledger.restore(began)
    with EventLog.create(path) as log:
        log.append(began)
        server = make_server(config, ledger, log, dump(config), restart=True)
        thread = threading.Thread(target=server.run)
        thread.start()
        deadline_s = time.monotonic() + 20.0
        while not ledger.state.dropped and time.monotonic() < deadline_s:
            time.sleep(0.02)
        server.stop("test")
        server.stop("test")
        thread.join(20.0)
    written = list(read_whole(path))
    assert [r.cause for r in written if isinstance(r, GroupDropped)][:1] == ["group_deadline"]
    times = [record.now for record in written]
    assert times == sorted(times)

"""A run that lasts: replay killed again and again, in segments so small that snapshots are written
and segments compacted all the time.
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.load import load
from replay.clients.learner import BatchReader
from replay.log.event_log import FILE_NAME, read
from replay.log.records import Delivered, ReplayRestarted, RunStarted, Sampled, Superseded
from replay.log.segments import segments
from replay.log.snapshots import ASIDE_SUFFIX, snapshots
from replay.restoring import restore
from replay.worker import make_ledger
from tests.children import ends_with_us
from tests.replay.ledger.machine import state_of
from tests.replay.server.test_restart import STEPS, Replay, Rollout, work

KILLS = 25
SMALL = """
import sys
from replay.log import event_log
event_log.SEGMENT_RECORDS = 15
from replay.worker import main
sys.exit(main(sys.argv[1:]))
"""


class Weeks(Replay):
    """Replay with segments of 15 records."""

    def _start(self, *flags: str) -> "subprocess.Popen[bytes]":
        words = [str(self.config), *flags, "replay.keep=committed"]
        return subprocess.Popen([sys.executable, "-c", SMALL, *words], env=ends_with_us())


@pytest.fixture
def replay() -> Iterator[Weeks]:
    with tempfile.TemporaryDirectory(prefix="forage-test-") as folder:
        found = Weeks(Path(folder), dead_after_s=60.0)
        yield found
        found.kill()


@pytest.mark.soak("weeks")
@pytest.mark.timeout(1500)
async def test_kills_among_snapshots_and_compaction_lose_and_repeat_nothing(
    replay: Weeks, rollout: Rollout
) -> None:
    path, kills = replay.folder / "run" / FILE_NAME, 0
    with BatchReader(replay.endpoint, 1, 600.0, 1.0, restart_deadline_s=600.0) as learner:
        await asyncio.to_thread(learner.resume, 0)
        working = asyncio.create_task(work(replay, rollout, learner))
        while not working.done() and kills < KILLS:
            await asyncio.sleep(0.1 + 0.07 * (kills % 5))
            if replay.count(RunStarted) and not working.done():
                replay.kill()
                replay.restart()
                kills += 1
                await asyncio.wait({working}, timeout=1.0)
        batches = await asyncio.wait_for(working, 600.0)
    assert kills > 1
    assert [fact.group_ids for fact in replay.facts if isinstance(fact, Sampled)] == batches
    audit = replay.check(replay.count(ReplayRestarted), superseded=replay.count(Superseded))
    assert audit.summary()["train_groups"]["committed"] == 2 * STEPS
    replay.process.wait(60.0)
    assert len(segments(path)) > 3 and list(snapshots(path))
    assert any(fact.compacted for fact in read(path) if isinstance(fact, Delivered))
    assert not list(path.parent.glob(f"*{ASIDE_SUFFIX}"))
    whole, restored = (make_ledger(load(replay.config)) for _ in range(2))
    whole.restore(read(path))
    restore(restored, path, lambda place, why: pytest.fail(why))
    assert state_of(restored.state) == state_of(whole.state)

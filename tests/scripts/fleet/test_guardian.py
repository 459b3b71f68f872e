"""Nothing of a run outlives its launcher."""

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.fleet import guardian


def sleeper(token: str) -> subprocess.Popen[bytes]:
    """A process of the run `token` that would go on for a minute, seen as such."""
    made = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, guardian.TOKEN: token},
        start_new_session=True,
    )
    end = time.monotonic() + 20.0
    while made.pid not in guardian.members(token) and time.monotonic() < end:
        time.sleep(0.01)  # its environment can be read a little later than Popen returns
    return made


def test_the_guardian_ends_members_and_only_members(tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    token = f"test-{os.getpid()}"
    watcher, member, stranger = (
        guardian.start(token, directory),
        sleeper(token),
        sleeper(f"{token}-other"),
    )
    time.sleep(0.5)
    assert member.poll() is None
    assert watcher.stdin is not None
    watcher.stdin.close()
    assert watcher.wait(60) == 0
    assert member.wait(30) == -9
    assert stranger.poll() is None
    assert not directory.exists()
    stranger.kill()
    stranger.wait()

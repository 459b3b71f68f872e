"""A command as its user starts it: what it says, whoever it starts, and that nobody is left."""

import os
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from configs.runtime.process import REPOSITORY
from scripts.fleet import guardian

DEADLINE_S = 240.0  # of one wait, on a machine that others keep busy


class Started:
    """A command under way: what it has said, and who belongs to it."""

    def __init__(self, words: list[str], said: Path) -> None:
        self._said, self._token = said, uuid.uuid4().hex
        with said.open("w") as out:
            self.process = subprocess.Popen(
                words,
                cwd=REPOSITORY,
                env=os.environ | {guardian.TOKEN: self._token},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def others(self) -> list[int]:
        """Whoever it has started, at whatever remove, and still lives."""
        return [pid for pid in guardian.members(self._token) if pid != self.process.pid]

    def until(self, reached: Callable[[], object]) -> None:
        """Wait for that while it runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def ended(self, others_s: float = 20.0) -> int:
        """Its exit code; nobody is left, once those are whose parent was killed."""
        code = self.process.wait(DEADLINE_S)
        deadline = time.monotonic() + others_s
        while self.others and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.others, self.said
        return code

    def end(self) -> None:
        guardian.sweep(self._token)
        self.process.wait()

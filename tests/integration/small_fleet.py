"""A fleet of small processes under the real supervisor, hosts and Ray:
`python -m tests.integration.small_fleet FOLDER FLEET`, where FLEET is the section `fleet` as JSON.

A process does what the file with its name in FOLDER says when it starts: it `fails`, `hangs`, or
`waits` (for others); without one it is ready. The learner ends well once there is a file `over`.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from configs.fleet import FleetConfig
from configs.schema import Config
from replay.protocol import Status
from scripts.fleet.console import Console
from scripts.fleet.fleet import Fleet
from scripts.fleet.resume import Progress
from scripts.fleet.supervisor import Supervisor

NAMES = ("learner", "actor-0", "actor-1", "actor-2")
PROCESS = """
import os, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
told = folder / name
does = told.read_text() if told.exists() else ""
if does == "fails":
    sys.exit(f"{name} fails")
if does != "hangs":
    Path(os.environ["FORAGE_READY"] + (".waiting" if does == "waits" else "")).touch()
while name != "learner" or not (folder / "over").exists():
    time.sleep(0.1)
"""


def main(folder: Path, fleet: FleetConfig) -> str:
    """Run one; return why it has ended."""
    commands = {name: ["-c", PROCESS, str(folder), name] for name in NAMES}
    config, stop = Config(run_dir=str(folder), fleet=fleet), SimpleNamespace(cause="")
    (folder / "logs").mkdir()

    def status(*_: int) -> Status:
        cause = "completed" if (folder / "over").exists() else ""
        return Status((), (), {}, {}, phase="", stop_cause=cause)

    with (
        tempfile.TemporaryDirectory(dir="/tmp") as scratch,  # sockets lie in it: a short path
        Fleet(folder / "logs", Path(scratch), {}) as members,
    ):
        members.start(commands)
        parts: Any = (config, members, Console(), stop, Progress(), lambda name: commands[name])
        replay: Any = SimpleNamespace(status=status)
        return Supervisor(*parts).watch(replay)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), FleetConfig(**json.loads(sys.argv[2]))))

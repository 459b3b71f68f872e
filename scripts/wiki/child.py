"""Python programs of others as child processes: they end with this one, however that ends."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.runtime.process import end_child, start_child

DEADLINE_S = 1800.0  # of one program: a download of 100 MB at 60 kB/s
_BEGIN = "from configs.runtime.process import die_with_parent\ndie_with_parent()\n"


def run(
    program: str,
    words: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> tuple[int, str]:
    """Run Python source with these arguments to its end; return its exit code and what it said,
    which goes to `log`. It is killed at the deadline, which is then said, and where an exception
    ends the wait.
    """
    command = ["-c", _BEGIN + program, *words]
    process = start_child(command, log=log, environment=environment)
    late = ""
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        late = f"\nended by us: not done after {deadline_s:g} s"
    finally:
        end_child(process, patience_s=0.0)
    return process.wait(), log.read_text(errors="replace") + late

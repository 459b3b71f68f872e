"""Python programs of others as child processes: they end with this one, however that ends."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.runtime.process import end_child, start_child

_BEGIN = "from configs.runtime.process import die_with_parent\ndie_with_parent()\n"


def run(
    program: str,
    words: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run Python source with these arguments to its end; return its exit code and what it said,
    which goes to `log`. It is killed where an exception ends the wait.
    """
    command = ["-c", _BEGIN + program, *words]
    process = start_child(command, log=log, environment=environment)
    try:
        code = process.wait()
    finally:
        end_child(process, patience_s=0.0)
    return code, log.read_text(errors="replace")

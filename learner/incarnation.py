"""Which start of the learner this is: a durable counter, so that no two starts share a number.

Consumes `<run_dir>/incarnation`; produces the next one, written before anybody hears it. A learner
that was stopped and wakes up beside its successor is refused by its lower number.
"""

from pathlib import Path

from configs.files import write_durably
from learner.errors import BadCheckpoint

FILE_NAME = "incarnation"


def next_incarnation(run_dir: str | Path, known: int = 0) -> int:
    """Count this start: one more than any before, `known` (a checkpoint's) included.

    Raises BadCheckpoint where the file holds no number.
    """
    incarnation = max(last_incarnation(run_dir), known) + 1
    write_durably(Path(run_dir) / FILE_NAME, f"{incarnation}\n".encode())
    return incarnation


def last_incarnation(run_dir: str | Path) -> int:
    """How many starts there were. Raises BadCheckpoint where the file holds no number."""
    path = Path(run_dir) / FILE_NAME
    text = path.read_text() if path.exists() else "0"
    if not text.strip().isdecimal():
        raise BadCheckpoint(
            f"{path}: {text!r} is not a number: write the highest incarnation in the event log"
        )
    return int(text)

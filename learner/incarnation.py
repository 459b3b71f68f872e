"""The incarnation: the number of this start of the learner, counted in `<run_dir>/incarnation`."""

from pathlib import Path

from configs.files import write_durably
from learner.errors import BadCheckpoint

INCARNATION_FILE = "incarnation"


def next_incarnation(run_dir: str | Path, known: int = 0) -> int:
    """Count this start durably: one more than any before, `known` (a checkpoint's) included.

    A learner that was stopped and wakes up beside its successor is refused by its lower number.
    Raises BadCheckpoint where the file holds no number.
    """
    incarnation = max(last_incarnation(run_dir), known) + 1
    write_durably(Path(run_dir) / INCARNATION_FILE, f"{incarnation}\n")
    return incarnation


def last_incarnation(run_dir: str | Path) -> int:
    """The number of starts so far. Raises BadCheckpoint where the file holds no number."""
    path = Path(run_dir) / INCARNATION_FILE
    text = path.read_text() if path.exists() else "0"
    if not text.strip().isdecimal():
        raise BadCheckpoint(
            f"{path}: {text!r} is not a number: write the highest incarnation in the event log"
        )
    return int(text)

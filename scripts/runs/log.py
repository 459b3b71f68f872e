"""The event log of a run's directory, for the commands that read all of it."""

from pathlib import Path

from configs.load import ConfigError
from replay.log.event_log import FILE_NAME
from replay.log.segments import exists, segments
from scripts.setup.resolve import run_directory

_MADE_BY_OTHERS = {  # by a file that they leave
    "summary.json": "`forage sync` made it and keeps no event log: its losses and last evaluation "
    "are in {run}/summary.json, and `forage ask {run}` asks its model",
    "steps.json": "`forage relearn` made it: its curve is {run}/relearn.png, its losses are in "
    "{run}/steps.json",
}


def log_of(run: Path) -> Path:
    """The log in a run's directory. Raises ConfigError where none is, saying what is there."""
    path = run_directory(run) / FILE_NAME
    if exists(path):
        return path
    what = f"no {FILE_NAME} there: a run has one once it has started, and `forage sync` keeps none"
    for name, made in _MADE_BY_OTHERS.items():
        if (run / name).is_file():
            what = made.format(run=run)
            break
    raise ConfigError(f"RUN = {str(run)!r}: {what}")


def reading(path: Path) -> str:
    """What is under way while a log is read. Raises LogError where a segment is missing."""
    size = sum(each.path.stat().st_size for each in segments(path))
    return f"reading {size / 1e6:,.1f} MB of {path.name}"

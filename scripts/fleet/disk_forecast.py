"""A forecast of the disk's room: when a run's directory will have filled it, at today's growth.

The log grows as long as the run does; checkpoints only until as many are kept as are to be. So the
first is a rate, measured over an hour, and the others are an amount that is still to come.
"""

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.runtime.files import weights_bytes
from configs.schema import Config
from configs.trust import flag_for
from scripts.setup.machine import batch_bytes, record_bytes

EVERY_S = 60.0  # between two looks at the files
WINDOW_S = 3600.0  # of the growth
LEAST_S = 600.0  # of looks, before anything is foretold: a start writes more than a step
BARE_BYTES = 1024  # about a rollout's share of the log without its trajectory
GB = 1e9


@dataclass(frozen=True)
class Look:
    """A run's directory at one time: `grown` bytes beside the checkpoints, which are `checkpoints`
    in number, the largest of them of `largest` bytes; `free` bytes of the disk.
    """

    at_s: float
    grown: int
    checkpoints: int
    largest: int
    free: int


@dataclass(frozen=True)
class Forecast:
    """Seconds until the disk is full, bytes a second of growth, and bytes still to come at once."""

    left_s: float
    growth: float
    to_come: int


def forecast(looks: Sequence[Look], kept: int) -> Forecast | None:
    """Foretell from looks in their order; `kept` checkpoints are to be there in the end. None:
    there are too few looks.
    """
    if not looks or looks[-1].at_s - looks[0].at_s < LEAST_S:
        return None
    first, last = looks[0], looks[-1]
    growth = (last.grown - first.grown) / (last.at_s - first.at_s)
    to_come = max(0, kept - last.checkpoints) * last.largest
    room = last.free - to_come
    if room <= 0:
        return Forecast(0.0, growth, to_come)
    return Forecast(room / growth if growth > 0 else math.inf, growth, to_come)


def look(run_dir: Path, at_s: float) -> Look:
    """Look at a run's directory; what goes away meanwhile is passed over."""
    grown, checkpoints = 0, dict[str, int]()
    for folder, _, names in os.walk(run_dir):
        parts = Path(folder).relative_to(run_dir).parts
        size = sum(_size(Path(folder, name)) for name in names)
        if parts[:1] == ("checkpoints",) and len(parts) > 1:
            checkpoints[parts[1]] = checkpoints.get(parts[1], 0) + size
        else:
            grown += size
    free = shutil.disk_usage(run_dir).free
    return Look(at_s, grown, len(checkpoints), max(checkpoints.values(), default=0), free)


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_blocks * 512


class DiskWatch:
    """Looks at a run's disk now and then, and warns while it is going to be full too soon."""

    def __init__(self, config: Config, say: Callable[[str, str], None]) -> None:
        """`say(text, style)` tells the person at the terminal."""
        self._run_dir, self._say = Path(config.run_dir), say
        self._flag = flag_for(config)
        self._keeps_all = config.replay.keep == "all"
        self._soon_s = config.fleet.disk_warning_s
        self._kept = most_checkpoints(config)
        self._looks: deque[Look] = deque(maxlen=int(WINDOW_S / EVERY_S) + 1)
        self._next_s = -math.inf
        self._warned_s = math.inf  # what was left at the last warning

    def tend(self, now: float) -> None:
        """Look, if it is time to; say what is foretold, and again once half of that is left."""
        if now < self._next_s:
            return
        self._next_s = now + EVERY_S
        try:
            self._looks.append(look(self._run_dir, now))
        except OSError:
            return
        found = forecast(self._looks, self._kept)
        if found is None or found.left_s >= self._soon_s:
            self._warned_s = math.inf if found else self._warned_s
        elif found.left_s < self._warned_s / 2 or self._warned_s == math.inf:
            self._warned_s = found.left_s
            less = with_less(self._run_dir, self._flag) if self._keeps_all else ""
            said = warning(self._run_dir, self._looks[-1].free, found)
            self._say(said + less, "bold yellow")


def with_less(run_dir: Path, flag: str) -> str:
    """What else to do where `replay.keep` keeps all; `flag`: of the command that goes on."""
    return (
        f", or end it (Ctrl-C; detached: kill -INT {os.getpid()}) and go on with less kept: "
        f"`forage resume {run_dir}{flag} replay.keep=committed`"
    )


def warning(run_dir: Path, free: int, found: Forecast) -> str:
    """The warning of a disk that fills."""
    when = f"in about {found.left_s / 3600:.1f} h" if found.left_s else "with its checkpoints"
    more = f", and checkpoints still to come take {found.to_come / GB:.1f} GB" * (found.to_come > 0)
    return (
        f"the disk of {run_dir} is full {when}: {free / GB:.1f} GB are free, the run grows by "
        f"{3600 * found.growth / GB:.2f} GB an hour{more}: free some"
    )


def most_checkpoints(config: Config) -> int:
    """How many there are at once: those that are kept, the best where there are evaluations, and
    the one that is being written, where a sentinel goes back two for it; never more than a run
    makes, of which the best is one.
    """
    learner, back = config.learner, config.sentinels.roll_back
    made = math.ceil(learner.total_steps / learner.checkpoint_every)
    made += (1 + config.sentinels.rollbacks) * bool(back)  # the start's, and one each rollback
    return min(made, learner.keep_checkpoints + bool(config.questions.eval) + 1 + 2 * bool(back))


def log_bytes(config: Config) -> int:
    """About how large the log becomes at most, with what `replay.keep` leaves in it."""
    settings, learner = config.replay, config.learner
    rollouts = learner.total_steps * settings.groups_per_step * settings.group_size
    whole, bare = rollouts * record_bytes(config), rollouts * BARE_BYTES
    if settings.keep == "all":
        return whole
    steps = learner.checkpoint_every + settings.max_staleness + 1  # not saved yet
    asked_for = steps * batch_bytes(config) + 2 * settings.segment_bytes  # with what lies beside
    closed = bare if isinstance(settings.keep, str) else max(bare, settings.keep)
    return min(whole, closed + asked_for)


def reckoned(config: Config, free: int) -> tuple[str, bool]:
    """What a run of the configured steps will take at most, and whether that is free; '' for one
    without steps. Evaluations are not in it.
    """
    settings, length = config.replay, config.model.max_model_len
    rollouts = config.learner.total_steps * settings.groups_per_step * settings.group_size
    if not rollouts:
        return "", True
    log, kept = log_bytes(config), most_checkpoints(config)
    saved = kept * config.learner.saved_bytes(weights_bytes(config.model.path))
    what = (
        f"the run will take up to {(log + saved) / GB:.1f} GB of disk: {rollouts:,} rollouts of at "
        f"most {length:,} tokens {log / GB:.1f} (replay.keep = {settings.keep}), {kept} "
        f"checkpoints {saved / GB:.1f}; {free / GB:.1f} are free"
    )
    return what, log + saved <= free

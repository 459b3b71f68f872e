"""Slices: commands that are ended in order when the time of one call is over."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scripts.bench.harness import Report
from scripts.bench.wiki.seed import Seed
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline.commands import OutOfTime, forage

START_S = 90.0  # about what an engine takes to start: nothing is begun for less
FIRST_S = 2 * START_S  # of the first command, which is begun in any case
ENDING_S = 180.0  # what an end in order takes: an update under way (two minutes), its checkpoint
Forage = Callable[[Sequence[str], Path | None, Callable[[], bool], float], None]


class Slice:
    """The time of one call. Call it to run a command. What is under way `ENDING_S` before its end
    is ended in order, and killed at its end. Towards the end none is begun but the first.
    """

    def __init__(
        self,
        minutes: float,
        forage: Forage = forage,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forage, self._now, self._begun = forage, now, False
        self._until = now() + 60.0 * minutes - ENDING_S

    def require(self, what: str) -> None:
        """Raise OutOfTime where nothing is begun any more."""
        if self._begun and self._now() + START_S > self._until:
            raise OutOfTime(what)

    def is_over(self) -> bool:
        """True from the moment on when what is under way has to end."""
        return self._now() >= self._until

    def __call__(self, words: Sequence[str], log: Path | None) -> None:
        """Run a command. Raises OutOfTime, WikiError, KeyboardInterrupt."""
        self.require(f"forage {words[0]}")
        if not self._begun and self.is_over():  # the files took all of it
            self._until = self._now() + FIRST_S
        self._begun = True
        self._forage(words, log, self.is_over, ENDING_S)


def work(seeds: Iterable[Seed], time_left: Slice, report: Report) -> None:
    """Make what is left, seed by seed, until all is there or the slice is over. Raises ConfigError,
    KeyboardInterrupt, and, once the other seeds have had their turn, the first WikiError of one.
    """
    failures: list[WikiError] = []
    try:
        for seed in seeds:
            try:
                _work(seed, time_left, report)
            except WikiError as error:
                report(f"seed {seed.number}: {error}")
                failures.append(WikiError(f"seed {seed.number}: {error}"))
    except OutOfTime as ended:
        report(f"the slice is over: {ended} goes on with the next")
    if failures:
        raise failures[0]


def _work(seed: Seed, time_left: Slice, report: Report) -> None:
    for piece in seed.left:
        time_left.require(piece)
        report(f"seed {seed.number}: {piece}")
        seed.do(piece, time_left, report)

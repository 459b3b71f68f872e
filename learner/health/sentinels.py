"""The sentinels of a run: the rules, held against every step's gauges.

What they watch is kept in `<run_dir>/sentinels.jsonl`, a line a step: a learner that resumes judges
as if never interrupted, and `forage show` lists what was said. Of a step that is trained again the
last line counts. Nothing here imports torch.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median

import msgspec

from configs.runtime.files import replacing
from configs.schema import Config
from learner.health.rules import RULES, Rule, gauge_of, median_of, reward_of, said

FILE_NAME = "sentinels.jsonl"
NO_GROUPS = ("none", "critic")  # baselines that learn from groups of equal rewards too
WAY_ON = (
    "start anew from a checkpoint of before (model.path=RUN/checkpoints/step-N/model), or resume "
    "with sentinels.{}=warn"
)
_log = logging.getLogger(__name__)


class Noted(msgspec.Struct, frozen=True):
    """A line of the file: a step's watched gauges, and the rules that fired."""

    step: int
    gauges: dict[str, float]
    fired: tuple[str, ...] = ()


class Series:
    """What one rule is judged by: the values of its warm-up, and the newest of its window; and its
    verdict, which stands until a step has the gauge again.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._first: list[float] = []
        self._newest = deque[float](maxlen=rule.window)
        self._rewards = deque[float](maxlen=rule.window)
        self._fires = False

    @property
    def median(self) -> float:
        """What the newest verdict is of; a window that is empty has none."""
        return median(self._newest)

    def take(self, gauges: Mapping[str, float]) -> bool:
        """Take a step's gauges; return whether the rule fires."""
        if (value := gauges.get(self._rule.gauge)) is None:
            return self._fires
        if len(self._first) < self._rule.warm_up:
            if value:  # 0 tells nothing of what is usual: a step without signal has no gradient
                self._first.append(value)
        else:
            self._newest.append(value)
        if (reward := reward_of(gauges)) is not None:
            self._rewards.append(reward)
        self._fires = self._rule.fires([*self._first, *self._newest], list(self._rewards))
        return self._fires


class Sentinels:
    """Judges the steps of a run in order, and notes them."""

    def __init__(self, config: Config, resumed_after: int = 0) -> None:
        """Know what is noted of the steps up to `resumed_after`, and forget those behind it."""
        self._path = Path(config.run_dir) / FILE_NAME
        actions = {name: getattr(config.sentinels, name) for name in RULES}
        if config.learner.baseline in NO_GROUPS:
            actions["no_signal"] = "off"
        self._on = {name: action for name, action in actions.items() if action != "off"}
        self._series = {name: Series(rule) for name, rule in RULES.items()}
        self._watched = sorted({gauge for rule in RULES.values() for gauge in rule.watched})
        if self._path.exists():
            with replacing(self._path) as draft, draft.open("wb") as file:
                file.writelines(map(_line, self._known(resumed_after)))

    def judge(self, step: int, gauges: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """Take the gauges of a step; return the sentinels' own, 1 where one fires and the median
        that it judged, and why the run is to stop: empty where it goes on.
        """
        given = {name: gauges[name] for name in self._watched if name in gauges}
        watched = {name: value for name, value in given.items() if isfinite(value)}
        fired = self._take(watched)
        noted = Noted(step, watched, fired)
        try:
            with self._path.open("ab") as file:
                file.write(_line(noted))
        except OSError as error:  # a full disk: the run may outlive it
            _log.warning("%s: step %d is not noted: %s", self._path, step, error)
        told = {gauge_of(name): float(name in fired) for name in self._on}
        told |= {median_of(name): self._series[name].median for name in fired}
        stop = next((name for name in fired if self._on[name] == "stop"), "")
        why = f"{said(stop, step, told[median_of(stop)])}; {WAY_ON.format(stop)}" if stop else ""
        return told | {"learner/sentinels_fired": float(len(fired))}, why

    def _known(self, resumed_after: int) -> Iterator[Noted]:
        for noted in read_notes(self._path.parent):
            if noted.step <= resumed_after:
                self._take(noted.gauges)
                yield noted

    def _take(self, gauges: Mapping[str, float]) -> tuple[str, ...]:
        fired = [name for name, series in self._series.items() if series.take(gauges)]
        return tuple(name for name in fired if name in self._on)


def read_notes(run_dir: str | Path) -> Iterator[Noted]:
    """The lines of a run, by step; none where it has no file. What is no such line (a kill cuts the
    last one short) is left out.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=Noted)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue


@dataclass
class Span:
    """Steps in a row at which a rule fired."""

    name: str
    first: int
    last: int


def spans(lines: Iterable[Noted]) -> list[Span]:
    """When each rule fired, in the order in which they began."""
    found: list[Span] = []
    open_: dict[str, Span] = {}
    for noted in lines:
        open_ = {name: span for name, span in open_.items() if name in noted.fired}
        for name in noted.fired:
            if name not in open_:
                found.append(open_.setdefault(name, Span(name, noted.step, noted.step)))
            open_[name].last = noted.step
    return found


def _line(noted: Noted) -> bytes:
    return msgspec.json.encode(noted) + b"\n"

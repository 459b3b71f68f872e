"""The sentinels of a run: the rules, held against every step's gauges.

What they watch is kept in `<run_dir>/sentinels.jsonl`, a line a step: a learner that resumes judges
as if never interrupted, and `forage show` lists what was said. Of a step that is trained again the
last line counts. Nothing here imports torch.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from configs.runtime.files import decoded, replacing, sync
from configs.schema import Config
from configs.sentinels import NO_GROUPS
from learner.health.rollback import Rollback, good_before, needed
from learner.health.rules import (
    RATE_SCALE,
    ROLLBACKS,
    ROLLED_BACK_TO,
    RULES,
    Rule,
    gauge_of,
    median_of,
    reward_of,
    said,
)

FILE_NAME = "sentinels.jsonl"
WAY_ON = (
    "start anew from a checkpoint of before (model.path=RUN/checkpoints/step-N/model), or resume "
    "with sentinels.{}=warn"
)
_log = logging.getLogger(__name__)


class Noted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file: a step's watched gauges, the rules that fired, and the rollback."""

    step: int
    gauges: dict[str, float]
    fired: tuple[str, ...] = ()
    rollback: Rollback | None = None


class Verdict(NamedTuple):
    """The answer to a step: the sentinels' own gauges, why the run is to stop (empty: it goes on),
    and the rollback that is to be made.
    """

    told: dict[str, float]
    stop: str = ""
    rollback: Rollback | None = None


class Series:
    """What one rule is judged by: the values of its warm-up, and the newest of its window, with
    their steps; and its verdict, which stands until a step has the gauge again.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._first: list[tuple[int, float]] = []
        self._newest = deque[tuple[int, float]](maxlen=rule.window)
        self._rewards = deque[float](maxlen=rule.window)
        self._fires, self._since = False, 0
        self._unjudged: int | None = None  # since a rollback, while its window is the first

    @property
    def is_warm(self) -> bool:
        """True once its warm-up is over."""
        return len(self._first) >= self._rule.warm_up

    @property
    def bound(self) -> float | None:
        """What its median is held against."""
        return self._rule.bound([value for _, value in self._first])

    @property
    def median(self) -> float:
        """What the newest verdict is of; a window that is empty has none."""
        return median(value for _, value in self._newest)

    @property
    def first(self) -> int | None:
        """The first step of its window, and where it fires of that in which it began to; None where
        the window is empty. After a rollback the first window counts from there on: it is the
        first to tell of those steps too.
        """
        return self._since if self._fires else self._begin

    @property
    def _begin(self) -> int | None:
        if self._unjudged is not None:
            return self._unjudged
        return self._newest[0][0] if self._newest else None

    def forget(self, since: int, rolled_back: int) -> None:
        """Begin anew after the rollback of step `rolled_back`, with no more than what its warm-up
        has of the steps before `since`.
        """
        self._unjudged = rolled_back + 1
        self._first = [(step, value) for step, value in self._first if step < since]
        self._newest.clear()
        self._rewards.clear()
        self._fires = False

    def take(self, step: int, gauges: Mapping[str, float]) -> bool:
        """Take a step's gauges; return whether the rule fires."""
        if (value := gauges.get(self._rule.gauge)) is None:
            return self._fires
        if not self.is_warm:
            if value:  # 0 tells nothing of what is usual: a step without signal has no gradient
                self._first.append((step, value))
        else:
            if len(self._newest) == self._rule.window:
                self._unjudged = None
            self._newest.append((step, value))
        if (reward := reward_of(gauges)) is not None:
            self._rewards.append(reward)
        values = [value for _, value in (*self._first, *self._newest)]
        fires = self._rule.fires(values, list(self._rewards))
        if fires and not self._fires:
            self._since = self._begin or step
        self._fires = fires
        return fires


class Sentinels:
    """Judges the steps of a run in order, and notes them.

    After a rollback all rules begin anew: their windows are of weights that are gone, and so may be
    what the next `replay.max_staleness` steps are trained on.
    """

    def __init__(
        self, config: Config, resumed_after: int = 0, rollbacks: Sequence[Rollback] = ()
    ) -> None:
        """Know what is noted of the steps up to `resumed_after`, with the rollbacks made in them,
        and forget those behind it.
        """
        self._path = Path(config.run_dir) / FILE_NAME
        self._config, self._staleness = config.sentinels, config.replay.max_staleness
        self._last_step = config.learner.total_steps
        self.rollbacks: tuple[Rollback, ...] = ()
        self._on = {name: each for name, each in actions(config).items() if each != "off"}
        self._series = {name: Series(rule) for name, rule in RULES.items()}
        self._watched = sorted({gauge for rule in RULES.values() for gauge in rule.watched})
        if self._path.exists():
            with replacing(self._path) as draft, draft.open("wb") as file:
                file.writelines(map(_line, self._known(resumed_after, rollbacks)))
        self._go_back_again(rollbacks, resumed_after)

    @property
    def rolls_back(self) -> bool:
        """True where a rule has the learner go back."""
        return "rollback" in self._on.values()

    @property
    def scale(self) -> float:
        """How many times the configured rates are taken now."""
        return self.rollbacks[-1].scale if self.rollbacks else 1.0

    def needed(self, step: int, saved: Iterable[int]) -> list[int]:
        """Of the saved steps those whose checkpoint a rollback after `step` may ask for."""
        if not self.rolls_back:
            return []
        own = [each.first for name, each in self._series.items() if self._goes_back(name)]
        firsts = {step + 1 if each is None else each for each in own}
        saved = list(saved)
        return sorted({one for each in firsts for one in needed(each, saved, self.rollbacks)})

    def judge(
        self,
        step: int,
        gauges: Mapping[str, float],
        saved: Iterable[int] = (),
        usable: Callable[[int], bool] = lambda step: True,
    ) -> Verdict:
        """Take the gauges of a step; say 1 where a rule fires, with the median that it judged, and
        what is to be done. A rollback, to one of the `saved` steps that is `usable`, then counts as
        made. There is none at the run's last step.
        """
        given = {name: gauges[name] for name in self._watched if name in gauges}
        watched = {name: value for name, value in given.items() if isfinite(value)}
        fired = self._take(step, watched)
        told = {gauge_of(name): float(name in fired) for name in self._on}
        told |= {median_of(name): self._series[name].median for name in fired}
        told["learner/sentinels_fired"] = float(len(fired))
        stop, rollback = self._answer(step, fired, saved, usable)
        self._note(Noted(step, watched, fired, rollback))
        if rollback:
            self._begin_anew(rollback)
            told[ROLLED_BACK_TO] = float(rollback.to)
        if self.rolls_back or self.rollbacks:
            told |= {ROLLBACKS: float(len(self.rollbacks)), RATE_SCALE: self.scale}
        return Verdict(told, stop, rollback)

    def _answer(
        self, step: int, fired: Sequence[str], saved: Iterable[int], usable: Callable[[int], bool]
    ) -> tuple[str, Rollback | None]:
        """Why the run is to stop, and the rollback that is made if it is not."""
        if stop := next((name for name in fired if self._on[name] == "stop"), ""):
            return self._why(stop, step), None
        back = {name: self._series[name].first or 0 for name in fired if self._goes_back(name)}
        if not back or step >= self._last_step:
            return "", None
        rule = min(back, key=back.__getitem__)
        if len(self.rollbacks) >= self._config.rollbacks:
            used = _used(self._config.rollbacks, len(self.rollbacks))
            return self._why(rule, step, used), None
        since = back[rule]
        to = next(filter(usable, good_before(since, saved, self.rollbacks)), None)
        if to is None:
            return self._why(rule, step, _none_before(since, rule)), None
        scale = self.scale * self._config.rollback_rate
        return "", Rollback(step=step, since=since, to=to, rule=rule, scale=scale)

    def _why(self, rule: str, step: int, more: str = "") -> str:
        return f"{said(rule, step, self._series[rule].median)}; {more}{WAY_ON.format(rule)}"

    def _goes_back(self, rule: str) -> bool:
        return self._on.get(rule) == "rollback"

    def _begin_anew(self, made: Rollback) -> None:
        self.rollbacks += (made,)
        for series in self._series.values():
            series.forget(made.since, made.step)

    def _go_back_again(self, rollbacks: Sequence[Rollback], step: int) -> None:
        """Begin anew for each rollback up to a step that is not known yet, noted or not."""
        for made in rollbacks[len(self.rollbacks) :]:
            if made.step <= step:
                self._begin_anew(made)

    def sync(self) -> None:
        """Force to the disk what is noted: before a checkpoint, which a learner resumes from."""
        try:
            if self._path.exists():
                sync(self._path)
        except OSError as error:
            _log.warning("%s: what is noted is not on the disk: %s", self._path, error)

    def _note(self, noted: Noted) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(_line(noted))
        except OSError as error:  # a full disk: the run may outlive it
            _log.warning("%s: step %d is not noted: %s", self._path, noted.step, error)

    def _known(self, resumed_after: int, rollbacks: Sequence[Rollback]) -> Iterator[Noted]:
        for noted in read_notes(self._path.parent):
            if noted.step <= resumed_after:
                self._go_back_again(rollbacks, noted.step - 1)
                self._take(noted.step, noted.gauges)
                self._go_back_again(rollbacks, noted.step)
                yield noted

    def _take(self, step: int, gauges: Mapping[str, float]) -> tuple[str, ...]:
        if self.rollbacks and step <= self.rollbacks[-1].step + self._staleness:
            return ()
        fired = [name for name, series in self._series.items() if series.take(step, gauges)]
        return tuple(name for name in fired if name in self._on)


def actions(config: Config) -> dict[str, str]:
    """The answer of a run to each rule."""
    found = {name: getattr(config.sentinels, name) for name in RULES}
    return found | {"no_signal": "off"} if config.learner.baseline in NO_GROUPS else found


def bounds(notes: Iterable[Noted], staleness: int) -> dict[str, float | None]:
    """What each rule's median is held against after these steps, in a run of this
    `replay.max_staleness`.
    """
    series, silent = {name: Series(rule) for name, rule in RULES.items()}, -1
    for noted in notes:
        for each in series.values():
            if not each.is_warm and noted.step > silent:
                each.take(noted.step, noted.gauges)
            if noted.rollback:
                each.forget(noted.rollback.since, noted.rollback.step)
        if noted.rollback:
            silent = noted.rollback.step + staleness
    return {name: each.bound for name, each in series.items()}


def read_notes(run_dir: str | Path) -> Iterator[Noted]:
    """The lines of a run, by step; none where it has no file. What is no such line (a kill cuts the
    last one short) is left out.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if found := decoded(line, Noted):
                yield found


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


def _used(limit: int, made: int) -> str:
    return (
        f"all rollbacks (sentinels.rollbacks = {limit}) are used: resume with "
        f"sentinels.rollbacks={2 * made}, and maybe a lower sentinels.rollback_rate, or "
    )


def _none_before(step: int, rule: str) -> str:
    return (
        f"no good checkpoint is older than step {step}: one is always kept where "
        f"sentinels.{rule}=rollback is set when the run begins; "
    )


def _line(noted: Noted) -> bytes:
    return msgspec.json.encode(noted) + b"\n"

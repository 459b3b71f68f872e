"""The live view of a run in a terminal: some rows at its foot, below which nothing is printed.

Rows break where the terminal is narrow, and the least of them are left out where it is low: nothing
is wider or higher than it. A row that has nothing to tell is not there.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from learner.health.rules import RATE_SCALE, ROLLBACKS, RULES, gauge_of
from replay.protocol import EvalResult, StepReport
from scripts.command.terminal import clean

REFRESHED_PER_S = 2.0
MOST_ROWS = 20
LEAST_ABOVE = 6  # rows of a terminal that are left to what is printed above
MOST_EVENTS, MOST_PACES = 4, 20
TRAINING = "training"  # the phase in which a pace tells how much is left
SILENT_S = 5.0  # from when on it is told that replay has said nothing new
Row = tuple[str, Sequence[tuple[str, str]]]  # its name; (words, style)


@dataclass(frozen=True)
class Facts:
    """All that the view tells. `steps`: when the newest ones were reported, in seconds."""

    run: str
    total_steps: int
    max_staleness: int
    begun_s: float
    phase: str = ""
    phase_s: float = 0.0  # when it began
    report: StepReport | None = None
    steps: tuple[tuple[int, float], ...] = ()
    first: EvalResult | None = None
    newest: EvalResult | None = None
    now: str = ""  # what replay does or waits for
    heard_s: float = 0.0
    fleet: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    actors: tuple[tuple[str, str], ...] = ()  # (name, why it does not work; '' where it does)
    events: tuple[tuple[str, str], ...] = ()  # (words, style), the newest last


class View:
    """Shows a run on a console of rich's until it is closed. What is printed goes above."""

    def __init__(self, console: Console, facts: Facts) -> None:
        self._console, self.facts = console, facts
        self._size = console.size
        self._live = self._started()

    def step(self, report: StepReport) -> None:
        """Tell a step."""
        steps = (*self.facts.steps, (report.step, time.monotonic()))[-MOST_PACES:]
        self._told(report=report, steps=steps)

    def evaluation(self, result: EvalResult) -> None:
        """Tell an evaluation."""
        self._told(first=self.facts.first or result, newest=result)

    def event(self, line: str, style: str) -> None:
        """Tell what has come about."""
        self._told(events=(*self.facts.events, (line.strip(), style))[-MOST_EVENTS:])

    def phase(self, name: str) -> None:
        """Tell what the launcher does."""
        self._told(phase=name, phase_s=time.monotonic())

    def now(self, what: str) -> None:
        """Tell what the run does or waits for."""
        self._told(now=what, heard_s=time.monotonic())

    def actors(self, states: Mapping[str, str], fleet: Mapping[str, Mapping[str, float]]) -> None:
        """Tell of each actor why it does not work ('' where it does), and the gauges of those."""
        self._told(actors=tuple(states.items()), fleet=fleet)

    def look(self) -> None:
        """Begin anew where the terminal has another size: what it has broken is out of place."""
        if (size := self._console.size) != self._size:
            self._size = size
            self._live.stop()
            self._console.clear()
            self._live = self._started()

    def close(self) -> None:
        """Leave the last rows as they are, and the terminal as it was."""
        if self._live.is_started:
            self._live.stop()
            # Events stand above; of actors that have ended there is nothing to tell.
            facts = replace(self.facts, events=(), actors=())
            for line in _lines(facts, self._console.width, MOST_ROWS, time.monotonic()):
                self._console.print(line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = console.height
        rows = min(MOST_ROWS, max(height - LEAST_ABOVE, height // 2), height - 1)
        yield from _lines(self.facts, options.max_width, rows, time.monotonic())

    def _told(self, **facts: object) -> None:
        self.facts = replace(self.facts, **facts)  # type: ignore[arg-type]
        self.look()

    def _started(self) -> Live:
        live = Live(
            self,
            console=self._console,
            refresh_per_second=REFRESHED_PER_S,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start(refresh=True)
        # Hidden, it would be so for ever where this process is killed.
        self._console.show_cursor(True)
        return live


def _lines(facts: Facts, width: int, most: int, now_s: float) -> list[Text]:
    """At most so many rows, none wider."""
    head = [line for row in _rows(facts, now_s) for line in _broken(row, width)][:most]
    left = most - len(head)
    events = [_cut(f"  {line}", style, width) for line, style in facts.events]
    actors = [line for row in _actor_rows(facts) for line in _broken(row, width)[:1]]
    room = max(left - min(len(events), max(1, left // 3)), 0)
    if len(actors) > room:
        unseen = len(actors) - max(room - 1, 0)
        actors = [*actors[: room - 1], _cut(f"  and {unseen} more", "dim", width)] if room else []
    shown = events[-(left - len(actors)) :] if left > len(actors) else []
    return [*head, *actors, *shown]


def _rows(facts: Facts, now_s: float) -> Iterable[Row]:
    yield "", _title(facts, now_s)
    yield "learning", _learning(facts)
    if facts.report:
        yield "speed", _speed(facts.report.gauges)
        yield "idle", _idle(facts)
        yield "fresh", _fresh(facts)
        yield "engines", _engines(facts.report.gauges)
        yield "sentinels", _sentinels(facts.report.gauges)
    if facts.now:
        silent_s = now_s - facts.heard_s
        since = f" (said {silent_s:.0f} s ago)" if silent_s > SILENT_S else ""
        yield "now", [(facts.now + since, "")]


def _title(facts: Facts, now_s: float) -> Sequence[tuple[str, str]]:
    told = [(facts.run, "bold"), (f"{facts.phase} {_clock(now_s - facts.phase_s)}", "bold cyan")]
    if facts.report:
        told.append((f"step {facts.report.step}/{facts.total_steps}", "bold"))
    told.append((f"{_clock(now_s - facts.begun_s)} in all", ""))
    if len(facts.steps) > 1 and facts.phase == TRAINING:
        (first, since_s), (last, until_s) = facts.steps[0], facts.steps[-1]
        left_s = (facts.total_steps - last) * (until_s - since_s) / max(last - first, 1)
        told.append((f"about {_clock(left_s)} left", ""))
    return told


def _learning(facts: Facts) -> Sequence[tuple[str, str]]:
    told = []
    if (newest := facts.newest) and (first := facts.first):
        before = f", {first.em:.3f} at {first.step}" if first.step != newest.step else ""
        told.append((f"EM {newest.em:.3f} at step {newest.step}{before}", "bold green"))
    if facts.report:
        told += [
            _told(facts.report.gauges, "actor/reward", "reward {:.2f}", "bold"),
            _told(facts.report.gauges, "actor/searches_per_rollout", "searches {:.2f}"),
            _told(facts.report.gauges, "replay/no_signal_fraction", "no signal {:.0%}"),
            _told(facts.report.gauges, "learner/loss", "loss {:+.3f}"),
        ]
    return told


def _speed(gauges: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    return [
        _told(gauges, "actor/tokens_per_s", "{:.0f} tok/s"),
        _told(gauges, "learner/update_s", "update {:.2f} s"),
        _told(gauges, "learner/wait_for_batch_s", "wait {:.2f} s"),
    ]


def _idle(facts: Facts) -> Sequence[tuple[str, str]]:
    assert facts.report
    gauges, told = facts.report.gauges, []
    waited = gauges.get("learner/wait_for_batch_s", 0.0)
    if whole := waited + gauges.get("learner/update_s", 0.0):
        told.append((f"learner {waited / whole:.0%}", ""))
    fleet = facts.fleet.values()
    capacity = sum(each.get("actor/capacity", 0.0) for each in fleet)
    if capacity:
        held = sum(each.get("actor/rollouts_in_flight", 0.0) for each in fleet)
        told.append((f"actors' capacity {max(0.0, 1.0 - held / capacity):.0%}", ""))
    return told


def _fresh(facts: Facts) -> Sequence[tuple[str, str]]:
    assert facts.report
    gauges = facts.report.gauges
    most = f"max {{:.0f}} of {facts.max_staleness}"
    return [
        _told(gauges, "replay/staleness", "staleness {:.2f}"),
        _told(gauges, "replay/staleness_max", most),
        _told(gauges, "replay/ready_groups", "ready {:.0f}"),
        _told(gauges, "learner/ess", "ess {:.2f}"),
    ]


def _engines(gauges: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    mismatches = gauges.get("actor/token_mismatch", 0.0)
    return [
        _told(gauges, "actor/kv_use_max", "kv {:.0%}"),
        _told(gauges, "actor/prefix_hit_rate", "hits {:.0%}"),
        _told(gauges, "sync/generation_pause_s", "pause {:.3f} s"),
        (f"TOKEN MISMATCHES {mismatches:.0f}" if mismatches else "", "bold red"),
    ]


def _sentinels(gauges: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    judged = [name for name in RULES if gauge_of(name) in gauges]
    fired = [(name, "bold yellow") for name in judged if gauges[gauge_of(name)]]
    told = fired or [("none fires", "green")] if judged else []
    if made := gauges.get(ROLLBACKS):
        told.append((f"rollbacks {made:.0f}, rate x {gauges[RATE_SCALE]:.3g}", "yellow"))
    return told


def _actor_rows(facts: Facts) -> Iterable[Row]:
    for name, state in facts.actors:
        gauges = facts.fleet.get(name, {})
        if state or not gauges:
            yield name, [(state or "starts", "yellow")]
            continue
        held = gauges.get("actor/rollouts_in_flight", 0.0)
        yield (
            name,
            [
                (f"rollouts {held:.0f}/{gauges.get('actor/capacity', 0.0):.0f}", ""),
                _told(gauges, "actor/tokens_per_s", "{:.0f} tok/s"),
                _told(gauges, "sync/policy_version", "version {:.0f}"),
                _told(gauges, "actor/kv_use_max", "kv {:.0%}"),
            ],
        )


def _told(gauges: Mapping[str, float], name: str, words: str, style: str = "") -> tuple[str, str]:
    return (words.format(gauges[name]) if name in gauges else "", style)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _broken(row: Row, width: int) -> list[Text]:
    """The row as lines that are broken between its words; of a word that is too long, the end is
    left out.
    """
    name, parts = row
    label = f"{clean(name):<10} " if name else ""
    lines, empty = [Text().append(label, "dim")], True
    for words, style in parts:
        if not words:
            continue
        word = Text(clean(words).replace("\n", " "), style)
        if not empty and lines[-1].cell_len + 2 + word.cell_len > width:
            lines.append(Text(" " * len(label)))
        elif not empty:
            lines[-1].append("  ")
        lines[-1].append_text(word)
        empty = False
    for line in lines:
        _fit(line, width)
    return [] if empty else lines


def _cut(line: str, style: str, width: int) -> Text:
    text = Text(clean(line).replace("\n", " "), style)
    _fit(text, width)
    return text


def _fit(text: Text, width: int) -> None:
    text.no_wrap, text.overflow = True, "ellipsis"
    text.truncate(width, overflow="ellipsis")

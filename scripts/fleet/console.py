"""The console of a run: phases with their seconds, a line a step, two rollouts an evaluation.

In a terminal no line is wider than it but for a path or URL that is, and once the live view is
open, that tells of the steps. In a file the lines that every run has are of FILE_WIDTH, so that
they can be read anywhere; warnings and causes stay whole there, for whoever searches for them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console as RichConsole

from configs.load import ConfigError
from configs.schema import Config
from learner.health.rules import Announcer
from replay.codec import decode_trajectory
from replay.protocol import EvalResult, Evaluated, Status, StepReport
from scripts.command.terminal import FILE_WIDTH, broken, clean
from scripts.fleet.view import Facts, View
from scripts.runs.show import load_tokenizer, render

# Without the view, after so long a silence it is said what is waited for.
REMIND_S = 15.0
BEGIN_REMIND_S = 5.0  # before the first step: nothing else is told
EVENTS = ("yellow", "bold yellow", "bold red", "bold green")  # the styles of what came about

LEGEND = {  # of the line of a step, in its order
    "tok/s": "tokens that all actors together sampled in the last second",
    "ready": "finished groups that wait for the learner",
    "staleness": "how many steps old the batch's tokens are",
    "no signal": "groups without a gradient: their rewards are all alike",
    "ess": "how much the correction leaves of the batch; 1 is all of it",
    "wait": "how long the learner waited for this batch",
    "update": "how long the learner's step took",
    "kv": "how full the engines' caches of contexts were at most; prefix hits",
    "pause": "how long new weights held an engine up",
}
# Parts of the line, as they are left out where there is no room.
LEAST_FIRST = (
    "kv", "pause", "update", "wait", "ess", "ready", "searches", "loss", "tok/s", "no signal",
)  # fmt: skip


class Console:
    """Prints a run. `phases_s` collects how long each named phase took."""

    def __init__(self, rich: RichConsole | None = None, record: bool = False) -> None:
        """`record` what is said, for `moved`."""
        self._rich = rich or RichConsole(highlight=False, soft_wrap=True, record=record)
        self._explained = False
        self._announcer = Announcer()
        self.phases_s: dict[str, float] = {}
        self._phase, self._since = "", time.monotonic()
        self._last_line = time.monotonic()
        self._view: View | None = None
        self._remind_s = BEGIN_REMIND_S

    def open(self, config: Config, phase: str) -> None:
        """Show the live view of a run, where there is a terminal that can have one, and open its
        first phase.
        """
        if self._rich.is_interactive:
            name, bound = Path(config.run_dir).name, config.replay.max_staleness
            now = time.monotonic()
            facts = Facts(name, config.learner.total_steps, bound, now, phase, now)
            self._view = View(self._rich, facts)
        self.phase(phase)

    def close(self) -> None:
        """Leave the last of the live view standing, and print lines from now on."""
        if self._view:
            view, self._view = self._view, None
            view.close()

    def status(self, status: Status, actors: Mapping[str, str]) -> None:
        """How the run stands, and of each actor why it does not work ('' where it does)."""
        if self._view:
            self._view.actors(actors, status.fleet)
        self.remind(status.phase)

    def say(self, text: str, style: str = "", short: bool = False) -> None:
        """One line, of several in a terminal too narrow for it; `short`: in a file too."""
        width = self._rich.width if self._rich.is_terminal else FILE_WIDTH if short else 0
        for line in clean(text).split("\n"):
            self._rich.print(broken(line, width) if width else line, style=style, markup=False)
        if self._view and style in EVENTS:
            self._view.event(text, style)
        self._last_line = time.monotonic()

    def moved(self) -> str:
        """What was said so far, plain, if that is on record; from now on look anew at what standard
        output is: a terminal gets colours, a file none.
        """
        said = self._rich.export_text() if self._rich.record else ""
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        return said

    def phase(self, name: str) -> None:
        """Close the phase that is open, saying what it took, and open the next ('' for none)."""
        now = time.monotonic()
        if self._phase:
            self.phases_s[self._phase] = self.phases_s.get(self._phase, 0.0) + now - self._since
            self.say(f"  {self._phase}: {now - self._since:.1f} s", "dim", short=True)
        self._phase, self._since = name, now
        if name:
            self.say(f"{name} ...", "bold")
        if self._view:
            self._view.phase(name)

    def remind(self, what: str) -> None:
        """After a silence, say what the run is doing or waiting for."""
        if self._view:
            self._view.now(what)
        elif time.monotonic() - self._last_line > self._remind_s:
            in_phase = f"({time.monotonic() - self._since:.0f} s in this phase)"
            self.say(f"  ... {what} {in_phase}", "dim", short=True)

    def step(self, report: StepReport, total_steps: int) -> None:
        """One line, of as much as a terminal has room for; in a file all, in lines of FILE_WIDTH;
        none beside the live view. Below it the sentinels that begin to fire.
        """
        self._remind_s = REMIND_S
        if self._view:
            self._view.step(report)
        else:
            self._line(report, total_steps)
        for line in self._announcer.lines(report.step, report.gauges):
            self.say(line, "bold yellow", short=True)

    def _line(self, report: StepReport, total_steps: int) -> None:
        parts = _parts(report, total_steps)
        if self._rich.is_terminal:
            for word in LEAST_FIRST:
                if sum(map(len, parts.values())) > self._rich.width:
                    parts.pop(word)
        if not self._explained:
            for word, meaning in LEGEND.items():
                if word in parts:
                    self.say(f"  {word}: {meaning}", "dim", short=True)
            self._explained = True
        lines = [""]
        for part in parts.values():
            if not self._rich.is_terminal and len(lines[-1] + part) > FILE_WIDTH:
                lines.append("  ")
            lines[-1] += part
        self.say("\n".join(lines))

    def evaluation(self, result: EvalResult, shown: Sequence[Evaluated], model_path: str) -> None:
        """An evaluation's line, and the newest of its rollouts."""
        if self._view:
            self._view.evaluation(result)
        known = sorted((n, em) for n, em in result.em_by_hops.items() if n != "0")
        hops = ", ".join(f"{n} hop{'s' * (n != '1')} {em:.2f}" for n, em in known)
        versions = f"version {result.oldest_version}"
        if result.newest_version != result.oldest_version:
            versions += f"-{result.newest_version}"
        sampled = "" if result.sampled_em is None else f"sampled EM {result.sampled_em:.3f}, "
        self.say(
            f"evaluation at step {result.step} ({versions}): EM {result.em:.3f}"
            f"{f' ({hops})' if hops else ''}, "
            f"{sampled}{result.searches:.2f} searches, {result.questions} questions",
            "bold green",
            short=True,
        )
        for line in of_sets(result):
            self.say(f"  {line}", "green", short=True)
        try:
            tokenizer = load_tokenizer(model_path)
        except ConfigError as error:
            self.say(f"  (no rollouts to show: {error})", "dim")
            return
        for each in shown:
            rollout = decode_trajectory(each.payload)
            shown_as = render((each.question, rollout, None), tokenizer)
            self._rich.print(shown_as, soft_wrap=False)


def of_sets(result: EvalResult) -> Iterator[str]:
    """Yield a line on what was scored beside exact match, and one on each data set."""
    if result.parts:
        yield "; ".join(f"{name} {mean:.3f}" for name, mean in result.parts.items())
    for name, found in result.sets.items():
        sampled = "" if found.sampled_em is None else f", sampled EM {found.sampled_em:.3f}"
        parts = "".join(f", {part} {mean:.3f}" for part, mean in found.parts.items())
        yield (
            f"{name}: EM {found.em:.3f}{sampled}{parts}, {found.searches:.2f} searches, "
            f"{found.questions} questions"
        )


def _parts(report: StepReport, total_steps: int) -> dict[str, str]:
    """The line of a step, by word."""
    gauges = report.gauges
    told = partial(_or_dash, gauges)
    most = told("replay/staleness_max", "{:.0f}")
    mismatches = gauges.get("actor/token_mismatch", 0.0)
    return {
        "step": f"step {report.step:>4}/{total_steps}",
        "reward": f"  reward {told('actor/reward', '{:.2f}')}",
        "loss": f"  loss {told('learner/loss', '{:+.3f}')}",
        "searches": f"  searches {told('actor/searches_per_rollout', '{:.2f}')}",
        "tok/s": f"  {told('actor/tokens_per_s', '{:.0f}'):>5} tok/s",
        "ready": f"  ready {told('replay/ready_groups', '{:.0f}'):>3}",
        "staleness": f"  staleness {told('replay/staleness', '{:.2f}')} (max {most})",
        "no signal": f"  no signal {told('replay/no_signal_fraction', '{:.0%}')}",
        "ess": f"  ess {told('learner/ess', '{:.2f}')}",
        "wait": f"  wait {told('learner/wait_for_batch_s', '{:.2f} s')}",
        "update": f"  update {told('learner/update_s', '{:.2f} s')}",
        "kv": f"  kv {told('actor/kv_use_max', '{:.0%}')} "
        f"hits {told('actor/prefix_hit_rate', '{:.0%}')}",
        "pause": f"  pause {told('sync/generation_pause_s', '{:.0f} ms', 1000.0)}",
        "mismatches": f"  TOKEN MISMATCHES {mismatches:.0f}" if mismatches else "",
    }


def _or_dash(gauges: Mapping[str, float], name: str, form: str, scale: float = 1.0) -> str:
    """A gauge's value; a dash where this step has not measured it, as the reward of rollouts where
    none has ended since the step before.
    """
    return form.format(scale * gauges[name]) if name in gauges else "-"

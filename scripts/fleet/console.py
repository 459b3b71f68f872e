"""The console of a run: phases with their seconds, a line a step, two rollouts an evaluation."""

import time
from pathlib import Path

from rich.console import Console as RichConsole

from configs.load import ConfigError
from replay.protocol import EvalResult, StepReport
from scripts.runs.show import last_evaluated, load_tokenizer, render

REMIND_S = 15.0  # never a silent minute: say what is waited for at least this often


class Console:
    """Prints a run. `phases_s` collects how long each named phase took."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self.phases_s: dict[str, float] = {}
        self._phase, self._since = "", time.monotonic()
        self._last_line = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """One line."""
        self._rich.print(text, style=style, markup=False)
        self._last_line = time.monotonic()

    def phase(self, name: str) -> None:
        """Close the phase that is open, saying what it took, and open the next ('' for none)."""
        now = time.monotonic()
        if self._phase:
            self.phases_s[self._phase] = self.phases_s.get(self._phase, 0.0) + now - self._since
            self.say(f"  {self._phase}: {now - self._since:.1f} s", "dim")
        self._phase, self._since = name, now
        if name:
            self.say(f"{name} ...", "bold")

    def remind(self, what: str) -> None:
        """After a silence, say what the run is doing or waiting for."""
        if time.monotonic() - self._last_line > REMIND_S:
            self.say(f"  ... {what} ({time.monotonic() - self._since:.0f} s in this phase)", "dim")

    def step(self, report: StepReport, total_steps: int) -> None:
        """One informative line per step."""
        g = report.gauges
        mismatches = g.get("actor/token_mismatch", 0)
        self.say(
            f"step {report.step:>4}/{total_steps}  reward {g.get('actor/reward', 0):.2f}  "
            f"loss {g.get('learner/loss', 0):+.3f}  searches "
            f"{g.get('actor/searches_per_rollout', 0):.2f}  "
            f"{g.get('actor/tokens_per_s', 0):>6.0f} tok/s  ready "
            f"{g.get('replay/ready_groups', 0):>3.0f}  "
            f"staleness {g.get('replay/staleness', 0):.2f} (max "
            f"{g.get('replay/staleness_max', 0):.0f})  "
            f"no signal {g.get('replay/no_signal_fraction', 0):.0%}  ess "
            f"{g.get('learner/ess', 0):.2f}  "
            f"wait {g.get('learner/wait_for_batch_s', 0):.2f} s  update "
            f"{g.get('learner/update_s', 0):.2f} s  "
            f"pause {1000 * g.get('sync/generation_pause_s', 0):.0f} ms"
            + (f"  TOKEN MISMATCHES {mismatches:.0f}" if mismatches else "")
        )

    def evaluation(self, result: EvalResult, run_dir: Path, model_path: str) -> None:
        """An evaluation's line, and two of its rollouts."""
        hops = ", ".join(
            f"{n} hop{'s' * (n != '1')} {em:.2f}" for n, em in sorted(result.em_by_hops.items())
        )
        versions = f"version {result.oldest_version}"
        if result.newest_version != result.oldest_version:
            versions += f"-{result.newest_version}"
        self.say(
            f"evaluation at step {result.step} ({versions}): EM {result.em:.3f} ({hops}), "
            f"sampled EM {result.sampled_em:.3f}, {result.searches:.2f} searches, "
            f"{result.questions} questions",
            "bold green",
        )
        try:
            tokenizer = load_tokenizer(model_path)
        except ConfigError as error:
            self.say(f"  (no rollouts to show: {error})", "dim")
            return
        for shown in last_evaluated(run_dir, 2):
            self._rich.print(render(shown, tokenizer))

"""What a person is told while a run goes on."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from learner.health.rules import (
    RATE_SCALE,
    ROLLBACKS,
    ROLLED_BACK_TO,
    RULES,
    gauge_of,
    median_of,
)
from replay.protocol import EvalResult, SetResult, StepReport
from scripts.fleet.console import LEGEND, Console

GAUGES = {
    "actor/reward": 0.78, "learner/loss": 0.061, "actor/tokens_per_s": 2495.0,
    "replay/ready_groups": 32.0, "replay/staleness": 2.0, "replay/staleness_max": 2.0,
    "replay/no_signal_fraction": 0.11, "learner/ess": 0.98, "actor/searches_per_rollout": 1.55,
    "actor/kv_use_max": 0.93, "actor/prefix_hit_rate": 0.66, "sync/generation_pause_s": 0.012,
}  # fmt: skip


def told(width: int, *, terminal: bool = True, total: int = 80, **gauges: float) -> list[str]:
    """The lines of two steps."""
    file = io.StringIO()
    rich = RichConsole(
        file=file, width=width, force_terminal=terminal, color_system=None, soft_wrap=True
    )
    console = Console(rich)
    for step in (21, 22):
        console.step(StepReport(step, GAUGES | gauges), total)
    return file.getvalue().splitlines()


@pytest.mark.parametrize(("count", "said"), [(2.0, "TOKEN MISMATCHES 2\n"), (0.0, "pause -\n")])
def test_a_token_mismatch_stands_in_the_line_of_its_step(
    capsys: pytest.CaptureFixture[str], count: float, said: str
) -> None:
    Console().step(StepReport(7, {"actor/token_mismatch": count}), 20)
    assert capsys.readouterr().out.endswith(said)


@pytest.mark.parametrize("total", [80, 1000, 100_000])
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_step_is_one_line_of_a_terminal(width: int, total: int) -> None:
    lines = told(width, total=total)
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line.startswith("step")] == ["step"] * 2
    assert "reward 0.78" in lines[-1] and "staleness 2.00" in lines[-1]


def test_80_columns_hold_what_matters_most() -> None:
    line = "step   22/80  reward 0.78   2495 tok/s  staleness 2.00 (max 2)  no signal 11%"
    assert told(80)[-1] == line
    (*_, line) = told(80, **{"actor/token_mismatch": 3.0})
    assert line.endswith("TOKEN MISMATCHES 3") and len(line) <= 80


def test_with_room_a_step_tells_everything() -> None:
    line = told(200)[-1]
    assert all(f" {word}" in line for word in LEGEND) and line.endswith("pause 12 ms")
    assert "  kv 93% hits 66%  " in line


def test_what_a_step_has_not_measured_is_not_told_as_0(capsys: pytest.CaptureFixture[str]) -> None:
    Console().step(StepReport(2, {"learner/loss": -0.045, "replay/staleness": 1.0}), 6)
    line = " ".join(capsys.readouterr().out.rpartition("step ")[2].split())
    assert line == (
        "2/6 reward - loss -0.045 searches - - tok/s ready - staleness 1.00 (max -) no signal - "
        "ess - wait - update - kv - hits - pause -"
    )


@pytest.mark.parametrize("width", [40, 200])
def test_in_a_file_a_step_tells_everything_in_short_lines(width: int) -> None:
    lines = told(width, terminal=False, total=100_000)
    assert max(map(len, lines)) <= 80
    begun = [number for number, line in enumerate(lines) if line.startswith("step")]
    first, *others = lines[begun[-1] :]
    assert "reward 0.78" in first and all(line.startswith("    ") for line in others)
    whole = " ".join([first, *others])
    assert all(f" {word}" in whole for word in LEGEND) and whole.endswith("pause 12 ms")


def spoken(console: Callable[[Console], None], width: int, terminal: bool) -> list[str]:
    file = io.StringIO()
    rich = RichConsole(
        file=file, width=width, force_terminal=terminal, color_system=None, soft_wrap=True
    )
    console(Console(rich))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 60, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    path = f"/runs/{'質問' * width}/log"
    said = (
        "remove something there " * 9, "質問に答える " * 30, "質問" * 90, "step\treward\t" * 9,
        "e\u0301" * 200, f"see {path} "
    )  # fmt: skip
    text = "  the disk of runs/x will be full in 3 hours: " + "".join(said)

    def speak(console: Console) -> None:
        console.phase("starting engines, verifying weights, evaluating the start")
        console.say(f"{text}\n{text}", "bold yellow")
        console.step(StepReport(1, {gauge_of(name): 1.0 for name in RULES}), 80)
        console.phase("")

    lines = spoken(speak, width, True)
    assert [line.strip() for line in lines if cell_len(line) > width] == [path] * 2
    assert "".join("".join(lines).split()).count("".join(text.split())) == 2
    whole = [" ".join(line.split()) for line in spoken(speak, width, False)]
    assert whole.count(" ".join(text.split())) == 2


@pytest.mark.parametrize(("width", "terminal"), [(60, True), (200, False)])
def test_a_sentinel_is_told_below_its_step_when_it_begins_to_fire(
    width: int, terminal: bool
) -> None:
    low = {"learner/current_ess": 0.9, median_of("ess"): 0.2}

    def speak(console: Console) -> None:
        for step, fires in enumerate((0.0, 1.0, 1.0), 1):
            console.step(StepReport(step, low | {gauge_of("ess"): fires}), 80)

    lines = spoken(speak, width, terminal)
    begun = [n for n, line in enumerate(lines) if line.startswith("sentinel")]
    assert len(begun) == 1 and max(map(len, lines)) <= 80
    assert any(line.startswith("step    2") for line in lines[: begun[0]])
    said = " ".join(" ".join(lines[begun[0] :]).split())
    assert "sentinel ess at step 2: a fifth of the batch" in said
    assert "(learner/current_ess at 0.2, below 0.8 by the median of 10 steps)" in said


def test_a_rollback_is_told_below_the_sentinel_that_asked_for_it() -> None:
    fires = {gauge_of("ess"): 1.0, median_of("ess"): 0.2}
    back = {ROLLBACKS: 1.0, ROLLED_BACK_TO: 20.0, RATE_SCALE: 0.5}

    def speak(console: Console) -> None:
        console.step(StepReport(31, fires | back), 80)
        console.step(StepReport(32, {gauge_of("ess"): 0.0, ROLLBACKS: 1.0, RATE_SCALE: 0.5}), 80)

    said = " ".join(" ".join(spoken(speak, 200, False)).split())
    assert said.count("rollback") == 1 and said.index("sentinel ess") < said.index("rollback 1")
    assert "rollback 1 at step 31: weights of step 20 restored; learning rate 0.5 times" in said


@pytest.mark.parametrize("width", [80, 200])
def test_the_words_of_the_line_are_explained_once(width: int) -> None:
    lines = told(width)
    for word, meaning in LEGEND.items():
        assert lines.count(f"  {word}: {meaning}") == (f" {word}" in lines[-1])


@pytest.mark.parametrize(
    ("hops", "said"),
    [
        ({"0": 0.7}, "EM 0.700, sampled"),
        ({"1": 0.9, "2": 0.5}, "EM 0.700 (1 hop 0.90, 2 hops 0.50), "),
    ],
)
def test_hops_are_told_where_questions_have_some(
    hops: dict[str, float], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = EvalResult(
        step=2,
        questions=10,
        em=0.7,
        sampled_em=0.6,
        em_by_hops=hops,
        sampled_em_by_hops=hops,
        searches=1.0,
        oldest_version=2,
        newest_version=2,
    )
    Console().evaluation(result, (), str(tmp_path))
    assert said in capsys.readouterr().out


def test_each_data_set_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {"nq": SetResult(4, 0.5, 0.25, 1.0, {"judge": 0.75}), "lab/x": SetResult(6, 0, None, 2)}
    Console().evaluation(
        EvalResult(2, 10, 0.2, None, {}, {}, 1.6, 2, 2, {"judge": 0.5}, sets=sets),
        (),
        str(tmp_path),
    )
    _, judge, nq, other, *_ = capsys.readouterr().out.splitlines()
    assert judge == "  judge 0.500"
    assert nq == "  nq: EM 0.500, sampled EM 0.250, judge 0.750, 1.00 searches, 4 questions"
    assert other == "  lab/x: EM 0.000, 2.00 searches, 6 questions"


def test_what_is_waited_for_is_said_oftener_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("scripts.fleet.console.time.monotonic", lambda: now)
    console = Console()

    def reminded(seconds: int) -> list[float]:
        nonlocal now
        told = list[float]()
        for _ in range(2 * seconds):
            now += 0.5
            console.remind("the engines start")
            told += [now] * ("... the engines start" in capsys.readouterr().out)
        return told

    assert reminded(20) == [5.5, 11.0, 16.5]
    console.step(StepReport(1, GAUGES), 80)
    assert reminded(40) == [35.5, 51.0]


def test_what_a_log_or_a_policy_says_does_not_move_the_terminal() -> None:
    file = io.StringIO()
    Console(RichConsole(file=file, width=60)).say("died: \x1b]0;owned\x07\u202e[/x]")
    assert file.getvalue() == "died: ]0;owned[/x]\n"

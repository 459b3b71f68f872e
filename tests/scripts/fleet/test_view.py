"""The live view of a run, as a terminal shows it."""

import io
import signal
from collections.abc import Callable

import pytest
from rich.console import Console as RichConsole

from configs.schema import Config, LearnerConfig
from learner.health.rules import RATE_SCALE, ROLLBACKS, RULES, gauge_of
from replay.protocol import EvalResult, Status, StepReport
from scripts.fleet.console import Console
from tests.scripts.terminals import run_in_terminal, screen

CONFIG = Config(run_dir="runs/demo", learner=LearnerConfig(total_steps=80))
GAUGES = {
    "actor/reward": 0.78, "learner/loss": 0.061, "actor/tokens_per_s": 2495.0,
    "learner/update_s": 0.75, "learner/wait_for_batch_s": 0.25, "replay/ready_groups": 32.0,
    "replay/staleness": 1.5, "replay/staleness_max": 2.0, "replay/no_signal_fraction": 0.11,
    "learner/ess": 0.98, "actor/searches_per_rollout": 1.55, "actor/kv_use_max": 0.93,
    "actor/prefix_hit_rate": 0.66, "sync/generation_pause_s": 0.03,
    **{gauge_of(name): 0.0 for name in RULES},
}  # fmt: skip
ACTOR = {
    "actor/rollouts_in_flight": 48.0, "actor/capacity": 64.0, "actor/tokens_per_s": 1200.0,
    "sync/policy_version": 3.0, "actor/kv_use_max": 0.9,
}  # fmt: skip


def status(actors: int, phase: str = "learner trains step 23") -> Status:
    return Status((), (), {}, {f"actor-{n}": ACTOR for n in range(actors)}, phase, "")


def shown(speak: Callable[[Console], None], width: int = 80, height: int = 24) -> list[str]:
    """The rows of a terminal after a console with its view has spoken."""
    file = io.StringIO()
    rich = RichConsole(
        file=file, width=width, height=height, force_terminal=True, color_system=None,
        soft_wrap=True, _environ={"TERM": "xterm"},
    )  # fmt: skip
    console = Console(rich)
    console.open(CONFIG, "training")
    speak(console)
    console.say("-")  # draws the view again
    said = file.getvalue()  # before it is closed
    console.close()
    return screen(said.replace("\n", "\r\n"), width, height)[-height:]


def speak(console: Console, actors: int = 2) -> None:
    console.step(StepReport(21, GAUGES), 80)
    console.say("actor-3 has died; restart 1 of 8 in 2 s", "bold yellow")
    console.evaluation(EvalResult(22, 9, 0.4, None, {}, {}, 1.0, 22, 22), (), "/nowhere")
    console.step(StepReport(22, GAUGES | {gauge_of("ess"): 1.0}), 80)
    states = dict.fromkeys(status(actors).fleet, "") | {"actor-9": "rests"}
    console.status(status(actors), states)


def test_80_columns_and_24_rows_hold_the_whole_run() -> None:
    rows = shown(speak)
    told = "\n".join(rows[rows.index(next(row for row in rows if row.startswith("demo"))) :])
    for words in (
        "training 0:00  step 22/80", "EM 0.400 at step 22", "reward 0.78", "searches 1.55",
        "no signal 11%", "2495 tok/s", "update 0.75 s", "learner 25%  actors' capacity 25%",
        "staleness 1.50  max 2 of 2", "kv 93%", "sentinels  ess", "learner trains step 23",
        "actor-1    rollouts 48/64  1200 tok/s  version 3  kv 90%", "actor-9    rests",
        "  actor-3 has died; restart 1 of 8", "  evaluation at step 22",
    ):  # fmt: skip
        assert words in told, told


def test_where_nothing_fires_it_says_so() -> None:
    rows = shown(lambda console: console.step(StepReport(21, GAUGES), 80))
    assert "sentinels  none fires" in rows


def test_it_says_how_often_the_learner_went_back_and_its_rate() -> None:
    back = {ROLLBACKS: 2.0, RATE_SCALE: 0.25}
    rows = shown(lambda console: console.step(StepReport(21, GAUGES | back), 80))
    assert "sentinels  none fires  rollbacks 2, rate x 0.25" in rows


@pytest.mark.parametrize("width", [20, 40, 60, 200])
@pytest.mark.parametrize("height", [5, 10, 24, 60])
def test_the_view_is_never_wider_or_higher_than_the_terminal(width: int, height: int) -> None:
    rows = shown(lambda console: speak(console, actors=30), width, height)
    assert max(map(len, rows)) <= width
    (top,) = (number for number, row in enumerate(rows) if row.startswith("demo  training"))
    assert len(rows) - top <= max(height - 6, height // 2)


def test_of_many_actors_some_are_told() -> None:
    rows = shown(lambda console: speak(console, actors=30))
    told = [row for row in rows if "rollouts" in row]
    (more,) = (row for row in rows if row.startswith("  and "))
    assert len(told) >= 3 and more == f"  and {30 - len(told)} more"


def test_what_is_printed_stands_above_the_view_once() -> None:
    rows = shown(speak, height=60)
    (printed,) = (n for n, row in enumerate(rows) if row.startswith("actor-3 has died"))
    (top,) = (n for n, row in enumerate(rows) if row.startswith("demo"))
    assert printed < top


def test_no_text_moves_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\u202e[red]x\ny"

    def tell(console: Console) -> None:
        console.say(evil, "bold yellow")
        console.status(status(0, evil), {evil: evil})

    rows = shown(tell)
    assert "training ..." in rows and any("[2J]0;owned[red]x y" in row for row in rows)
    assert not any("\u202e" in row for row in rows)


def test_a_wide_character_takes_two_columns() -> None:
    rows = shown(lambda console: console.status(status(0, "検索" * 30), {}), width=40)
    assert any(row.startswith("now        検索") and row.endswith("…") for row in rows)


RUN = """
import fcntl, os, signal, struct, sys, termios, time
from tests.scripts.fleet.test_view import CONFIG, Console, speak, status
console = Console()
try:
    console.open(CONFIG, "training")
    speak(console)
    if sys.argv[1] == "resize":
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
        console.status(status(1), {})
    elif sys.argv[1] != "end":
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(60)
finally:
    console.close()
    console.phase("")
    console.say("completed", "bold green")
"""


@pytest.mark.slow
def test_the_last_of_it_stands_at_the_end_and_what_follows_below() -> None:
    code, said = run_in_terminal(["-c", RUN, "end"], rows=24)
    rows = [row for row in screen(said, 80, 24) if row]
    assert code == 0 and rows[-1] == "completed" and cursor_shows(said)
    assert sum(row.startswith("demo  training") for row in rows) == 1
    assert "actor-9    rests" not in rows, "actors have ended"


@pytest.mark.slow
def test_after_a_resize_it_is_whole_again() -> None:
    code, said = run_in_terminal(["-c", RUN, "resize"], rows=24)
    rows = screen(said[said.rindex("\x1b[2J") :], 50, 24)
    assert code == 0 and max(map(len, rows)) <= 50
    assert sum(row.startswith("demo  training") for row in rows) == 1
    assert "sentinels  ess" in rows


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_the_terminal_sane(number: int) -> None:
    code, said = run_in_terminal(["-c", RUN, str(int(number))], rows=24)
    assert code != 0 and cursor_shows(said) and "\x1b[?1049h" not in said
    assert ("completed" in said) == (number == signal.SIGINT)


def cursor_shows(said: str) -> bool:
    return said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l")


@pytest.mark.slow
def test_a_terminal_that_cannot_move_its_cursor_gets_lines() -> None:
    code, said = run_in_terminal(["-c", RUN, "end"], term="dumb")
    assert code == 0 and "\x1b" not in said and "step   22/80  reward 0.78" in said

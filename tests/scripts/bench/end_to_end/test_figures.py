"""The arithmetic of the end-to-end benchmark: figures, ideal, ratios, exact match by mode."""

import math
import os
import subprocess
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from scripts.bench.end_to_end.figures import (
    em_by_mode,
    figures,
    ideal_token_s,
    interval,
    learning,
    of_ideal,
    over,
    over_ideal,
    summary,
    t_95,
)
from scripts.bench.end_to_end.record import Evaluation, Parts, Record, Step, Turns
from scripts.bench.end_to_end.report import draw, mean, tables
from scripts.bench.end_to_end.task import DEMO, WIKI
from scripts.bench.end_to_end.usage import Seen, Usage, role_of

PARTS = Parts(
    tokens_per_s=1000.0,
    token_cpu_s=0.002,
    turn_s=0.3,
    update_s=1.0,
    update_cpu_s=1.5,
    update_tokens=2000,
)


def step(at_s: float, tokens: int = 100, **more: Any) -> Step:
    told: dict[str, Any] = {"update_s": 0.5, "wait_s": 1.0, "pause_s": 0.1, "sampled": 110}
    return Step(at_s=at_s, tokens=tokens, **(told | more))


def usage(**seen: dict[int, list[Seen]]) -> Usage:
    made = Usage(0)
    made.seen.update(seen)
    return made


def row(mode: str, rate: float, seed: int = 0, latency: str = "tail", **more: Any) -> Any:
    told = {"learns": False, "learner_idle": 0.1, "engine_idle": 0.2}
    named = {"mode": mode, "tokens_per_s": rate, "seed": seed, "latency": latency}
    return named | told | more


# ---- a cell


def test_figures_are_of_the_steps_after_the_uncounted() -> None:
    stale = step(14.0, tokens=300, staleness=2.0, staleness_max=3.0, oldest_s=0.5)
    record = Record((step(1.0), step(10.0), step(12.0), stale), ())
    found = figures(record, usage(), warm_up=2)
    assert (found["step_s"], found["update_s"], found["wait_s"]) == (2.0, 0.5, 1.0)
    assert found["rest_s"] == pytest.approx(0.5) and found["oldest_s"] == 0.25
    assert found["learner_idle"] == 0.75
    assert (found["tokens"], found["tokens_per_s"]) == (200.0, 55.0)  # 220 were sampled
    assert found["sampled_over_trained"] == pytest.approx(220 / 400)
    assert (found["staleness"], found["staleness_max"]) == (1.5, 3.0)
    assert found["engine_idle"] is None and found["cpu"] == {}


def test_a_search_s_share_is_of_a_turn_s_generation() -> None:
    turns = Turns(turns=4, searches=2, generate_s=2.0, search_s=0.1)
    record = Record((step(1.0, turns=Turns(1, 1, 9.0, 9.0)), step(2.0, turns=turns)), ())
    found = figures(record, usage(), warm_up=1)
    assert (found["generate_s"], found["search_s"]) == (0.5, 0.05)
    assert found["search_share"] == pytest.approx(0.1)
    assert figures(Record((step(1.0), step(2.0)), ()), usage(), 1)["search_share"] is None


def test_an_engine_is_idle_while_its_main_thread_sleeps() -> None:
    busy = [Seen(at, cpu_s=at / 2, active_s=at) for at in (0.0, 5.0, 10.0)]
    half = [Seen(at, cpu_s=at / 4, active_s=at / 2) for at in (0.0, 5.0, 10.0)]
    gone = [Seen(0.0, 0.0, 0.0), Seen(3.0, 3.0, 3.0)]
    seen = usage(engine={1: busy, 2: half, 3: gone})
    assert seen.idle("engine", 2.0, 8.0) == pytest.approx(0.25)
    assert seen.cpu_s(2.0, 8.0) == {"engine": pytest.approx(4.5)}
    assert seen.idle("learner", 2.0, 8.0) is None


def test_a_process_is_known_by_its_command_line() -> None:
    assert role_of("VLLM::EngineCore") == "engine"
    assert role_of("python -m learner.worker /run/config.yaml") == "learner"
    assert role_of("ray::IDLE") == "other"


def test_a_look_sees_this_process_and_looks_no_more_than_twice_a_second() -> None:
    looked = Usage(os.getpid())
    looked.look()
    looked.look()
    assert [len(looks) for pids in looked.seen.values() for looks in pids.values()].count(1) >= 1


def test_a_process_is_seen_once_whatever_its_command_line_has_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Process(psutil.Process):  # type: ignore[misc]
        lines = [["bash"], ["VLLM::EngineCore"], []]

        def cmdline(self) -> list[str]:
            return self.lines.pop(0)

    monkeypatch.setattr(psutil, "Process", Process)
    times = iter(float(at) for at in range(1, 100))
    with subprocess.Popen(["sleep", "60"]) as process:
        looked = Usage(process.pid, now=lambda: next(times))
        for _ in range(3):
            looked.look()
        process.kill()
    assert [len(looks) for looks in looked.seen["engine"].values()] == [3]
    assert not looked.seen["other"]


def test_learning_tells_when_the_goal_was_reached() -> None:
    def run(*em: float) -> Record:
        found = (Evaluation(n, 10.0 * n, each, each - 0.1) for n, each in enumerate(em))
        return Record((), tuple(found))

    assert learning(run(0.1, 0.9, 0.95)) == {
        "em": 0.95,
        "sampled_em": pytest.approx(0.85),
        "em_goal_s": 10.0,
    }
    assert learning(run(0.1, 0.5))["em_goal_s"] is None


# ---- the ideal


@pytest.mark.parametrize(
    ("engines", "cores", "parts", "expected"),
    [
        (1, 64, PARTS, 1e-3),  # generation
        (8, 64, PARTS, 5e-4),  # training: 1 s of 2,000 tokens
        (8, 1, PARTS, 0.002 + 1.5 / 2000),  # the processors
        (2, 2, PARTS, (0.002 + 1.5 / 2000) / 2),
    ],
)
def test_the_ideal_is_the_most_of_three(
    engines: int, cores: int, parts: Parts, expected: float
) -> None:
    assert ideal_token_s(parts, engines, cores) == pytest.approx(expected)


def test_a_mode_is_compared_with_the_ideal_of_its_seed() -> None:
    best = 1.0 / ideal_token_s(PARTS, 2, 2)
    rows = [row("async_4", best * 0.8), row("async_4", best, seed=1), row("sync", 1.0)]
    assert over_ideal(rows, {0: PARTS}, "async_4", "tail", engines=2, cores=2) == pytest.approx(0.8)
    assert over_ideal(
        rows, {0: PARTS, 1: PARTS}, "async_4", "tail", engines=2, cores=2
    ) == pytest.approx(0.9)
    assert over_ideal(rows, {}, "async_4", "tail", engines=2, cores=2) is None


@pytest.mark.parametrize("trained", [[100, 100], [300, 100], [90, 130]])
@pytest.mark.parametrize("sampled", [[100, 100], [150, 90], [400, 200]])
def test_only_tokens_sampled_and_trained_count_beside_the_ideal(
    trained: list[int], sampled: list[int]
) -> None:
    pairs = zip(trained, sampled, strict=True)
    steps = [step(3.0 + n, t, sampled=s) for n, (t, s) in enumerate(pairs)]
    found = figures(Record((step(2.0), *steps), ()), usage(), warm_up=1)
    tokens, seconds = min(sum(trained), sum(sampled)), 2.0
    expected = tokens / seconds * ideal_token_s(PARTS, 2, 2)
    assert of_ideal(found, PARTS, 2, 2) == pytest.approx(expected)


# ---- ratios


def test_a_ratio_is_over_the_best_of_the_others_by_seed() -> None:
    rows = [
        row("async_4", 6.0),
        row("sync", 2.0),
        row("sync_2_engines", 3.0),
        row("async_4", 9.0, seed=1),
        row("sync", 3.0, seed=1),
        row("async_4", 7.0, seed=2),  # beside nothing
        row("sync", 70.0, latency="zero"),
    ]
    assert over(rows, "async_4", ["sync"], "tail") == 3.0
    assert over(rows, "async_4", ["sync", "sync_1_thread"], "tail") == 3.0  # as far as measured
    assert over(rows, "async_4", ["sync", "sync_2_engines"], "tail") == 2.0  # seed 0 has both
    assert over(rows, "async_4", ["lockstep"], "tail") is None
    still = [row("async_4", 20.0), row("sync", 0.0)]  # nothing was sampled in the counted steps
    assert over(still, "async_4", ["sync"], "tail") is None


def test_the_summary_names_every_figure() -> None:
    rows = [
        row("async_4", 6.0),
        row("sync", 2.0),
        row("lockstep", 1.0),
        row("async_4", 8.0, latency="zero"),
        row("sync", 4.0, latency="zero"),
    ]
    found = summary(rows, {0: PARTS}, DEMO, "async_4", 2)
    assert found["async_over_lockstep"] == 6.0 and found["async_over_overlapped"] == 3.0
    assert found["async_over_sync_zero_latency"] == 2.0
    assert found["rivals"]["async_over_overlapped"] == {
        "measured": ["sync"],
        "missing": ["sync_1_thread", "sync_2_engines"],
    }
    assert found["rivals"]["async_over_sync_zero_latency"]["measured"] == ["sync"]
    assert found["async_over_ideal_scaled"] is None and found["em_by_mode"] is None
    assert (found["learner_idle"], found["engine_idle"]) == (0.1, 0.2)


def test_the_wiki_task_s_ratios_are_over_its_own_modes_and_have_its_own_goals() -> None:
    best = 1.0 / ideal_token_s(PARTS, WIKI.engines, 2)
    rates = {"lockstep": 0.8, "sync": 0.85, "async_2": 0.816}
    rows = [row(mode, best * rate) for mode, rate in rates.items()]
    found = summary(rows, {0: PARTS}, WIKI, "async_2", 2)
    assert found["async_over_lockstep"] == pytest.approx(1.02)
    assert found["async_over_overlapped"] == pytest.approx(0.96)
    assert found["async_over_ideal"] == pytest.approx(0.816)
    assert found["rivals"]["async_over_overlapped"] == {"measured": ["sync"], "missing": []}
    assert found["async_over_sync_zero_latency"] is None
    met = {name: goal.met(found[name]) for name, goal in WIKI.goals.items()}
    assert met == {
        "async_over_lockstep": True,
        "async_over_overlapped": True,
        "async_over_ideal": False,
    }


def test_exact_match_is_paired_by_seed() -> None:
    def whole(mode: str, seed: int, em: float, goal_s: float | None = 30.0) -> Any:
        return row(mode, 1.0, seed, learns=True, em=em, sampled_em=em, em_goal_s=goal_s)

    rows = [whole("sync", 0, 0.9), whole("sync", 1, 0.8), whole("sync", 2, 0.9)]
    rows += [whole("async_4", 0, 0.91), whole("async_4", 1, 0.83, None)]
    found = em_by_mode(rows)
    assert found["sync"]["difference"] == 0.0 and found["sync"]["seeds"] == [0, 1, 2]
    assert found["async_4"]["difference"] == pytest.approx(0.02)
    assert found["async_4"]["interval"] == pytest.approx(interval([0.01, 0.03]))
    assert (found["async_4"]["reached"], found["async_4"]["em_goal_s"]) == (1, 30.0)


def test_an_interval_is_student_s() -> None:
    assert interval([1.0]) is None
    assert interval([0.0, 1.0, 2.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 200])
def test_student_s_t_holds_95_percent_of_its_density(freedom: int) -> None:
    half = (freedom + 1) / 2
    scale = math.exp(math.lgamma(half) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    at = np.linspace(0.0, t_95(freedom), 20_001)
    assert 2 * np.trapezoid(scale * (1 + at**2 / freedom) ** -half, at) == pytest.approx(0.95)


def test_exact_match_without_sampling_is_reported() -> None:
    whole = {"learns": True, "em": 0.9, "sampled_em": None, "em_goal_s": None}
    found = summary([row("sync", 1.0, **whole)], {}, DEMO, "async_4", 2)
    assert found["em_by_mode"]["sync"]["sampled_em"] is None
    _, learned, _ = tables([row("sync", 1.0, **whole)], {}, found, DEMO, title="one work", cores=2)
    assert list(learned.columns[3].cells) == ["–"]


def test_the_difference_in_exact_match_has_a_goal() -> None:
    whole = {"learns": True, "sampled_em": None, "em_goal_s": None}
    ems = {"sync": (0.96, 0.9), "async_8": (0.9, 0.88)}
    rows = [
        row(mode, 1.0, **whole, em=em, seed=seed)
        for mode, of in ems.items()
        for seed, em in enumerate(of)
    ]
    found = summary(rows, {}, DEMO, "async_8", 2)
    assert found["em_difference"] == pytest.approx(-0.04)
    *_, goals = tables(rows, {}, found, DEMO, title="one work", cores=2)
    told = [list(column.cells) for column in goals.columns]
    assert [each[0] for each in told[:3]] == ["em_difference", "-0.04", "≥ -0.03"]
    assert "missed" in str(told[3][0])


# ---- what is shown


def test_tables_and_plot_show_every_cell(tmp_path: Any) -> None:
    record = Record(tuple(step(float(n)) for n in range(1, 5)), ())
    made = figures(record, usage(), warm_up=2)
    rows = [
        made | {"mode": mode, "latency": latency, "seed": 0, "learns": False}
        for latency in ("tail", "zero")
        for mode in ("async_4", "sync")
    ]
    found = summary(rows, {0: PARTS}, DEMO, "async_4", 2)
    paces, goals = tables(rows, {0: PARTS}, found, DEMO, title="one work", cores=2)
    assert paces.row_count == 4 and list(paces.columns[1].cells)[:2] == ["sync", "async_4"]
    assert "async_over_overlapped: without sync_1_thread, sync_2_engines" in str(goals.title)
    assert goals.row_count == 4  # no lock-step, no scaled latency, no engine seen
    plot = draw(rows, DEMO, tmp_path / "plot.png")
    assert plot is not None and plot.stat().st_size > 0


def test_whole_runs_alone_have_no_plot(tmp_path: Any) -> None:
    whole = row("sync", 1.0, learns=True, em=0.9, sampled_em=None, em_goal_s=None)
    assert draw([whole], DEMO, tmp_path / "plot.png") is None


def test_an_unknown_idle_share_is_no_bar() -> None:
    told = {"step_s": 2.0, "update_s": 1.0, "wait_s": 0.5, "rest_s": 0.5}
    known, unknown = (row("sync", 1.0, **told, engine_idle=idle) for idle in (0.25, None))
    assert (mean([unknown])["idle_s"], mean([unknown])["busy_s"]) == (0.0, 0.0)
    assert (mean([known, unknown])["idle_s"], mean([known, unknown])["busy_s"]) == (0.5, 1.5)

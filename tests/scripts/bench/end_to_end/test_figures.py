"""The arithmetic of the end-to-end benchmark: figures, ideal, ratios, exact match by mode."""

from typing import Any

import pytest

from scripts.bench.end_to_end.figures import (
    em_by_mode,
    figures,
    ideal_token_s,
    interval,
    learning,
    over,
    over_ideal,
    summary,
)
from scripts.bench.end_to_end.record import Evaluation, Parts, Record, Step
from scripts.bench.end_to_end.report import draw, mean, tables
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
    stale = step(14.0, tokens=300, staleness=2.0, staleness_max=3.0)
    record = Record((step(1.0), step(10.0), step(12.0), stale), ())
    found = figures(record, usage(), warm_up=2)
    assert (found["step_s"], found["update_s"], found["wait_s"]) == (2.0, 0.5, 1.0)
    assert found["rest_s"] == pytest.approx(0.5) and found["learner_idle"] == 0.75
    assert (found["tokens"], found["tokens_per_s"]) == (200.0, 100.0)
    assert found["sampled_over_trained"] == pytest.approx(220 / 400)
    assert (found["staleness"], found["staleness_max"]) == (1.5, 3.0)
    assert found["engine_idle"] is None and found["cpu"] == {}


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
    import os

    looked = Usage(os.getpid())
    looked.look()
    looked.look()
    assert [len(looks) for pids in looked.seen.values() for looks in pids.values()].count(1) >= 1


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
    assert over_ideal(rows, {0: PARTS}, "async_4", "tail", 2) == pytest.approx(0.8)
    assert over_ideal(rows, {0: PARTS, 1: PARTS}, "async_4", "tail", 2) == pytest.approx(0.9)
    assert over_ideal(rows, {}, "async_4", "tail", 2) is None


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
    assert over(rows, "async_4", ["sync", "sync_2_engines"], "tail") == 2.5
    assert over(rows, "async_4", ["lockstep"], "tail") is None


def test_the_summary_names_every_figure() -> None:
    rows = [
        row("async_4", 6.0),
        row("sync", 2.0),
        row("lockstep", 1.0),
        row("async_4", 8.0, latency="zero"),
        row("sync", 4.0, latency="zero"),
    ]
    found = summary(rows, {0: PARTS}, "async_4", 2)
    assert found["async_over_lockstep"] == 6.0 and found["async_over_overlapped"] == 3.0
    assert found["async_over_sync_zero_latency"] == 2.0
    assert found["async_over_ideal_scaled"] is None and found["em_by_mode"] is None
    assert (found["learner_idle"], found["engine_idle"]) == (0.1, 0.2)


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
    assert interval([0.0, 1.0, 2.0]) == pytest.approx(4.303 / 3**0.5)


# ---- what is shown


def test_tables_and_plot_show_every_cell(tmp_path: Any) -> None:
    record = Record(tuple(step(float(n)) for n in range(1, 5)), ())
    made = figures(record, usage(), warm_up=2)
    rows = [
        made | {"mode": mode, "latency": latency, "seed": 0, "learns": False}
        for latency in ("tail", "zero")
        for mode in ("async_4", "sync")
    ]
    found = summary(rows, {0: PARTS}, "async_4", 2)
    paces, goals = tables(rows, {0: PARTS}, found, "one work", 2)
    assert paces.row_count == 4 and list(paces.columns[1].cells)[:2] == ["sync", "async_4"]
    assert goals.row_count == 4  # no lock-step, no scaled latency, no engine seen
    assert draw(rows, tmp_path / "plot.png").stat().st_size > 0


def test_an_unknown_idle_share_is_no_bar() -> None:
    told = {"step_s": 2.0, "update_s": 1.0, "wait_s": 0.5, "rest_s": 0.5}
    known, unknown = (row("sync", 1.0, **told, engine_idle=idle) for idle in (0.25, None))
    assert (mean([unknown])["idle_s"], mean([unknown])["busy_s"]) == (0.0, 0.0)
    assert (mean([known, unknown])["idle_s"], mean([known, unknown])["busy_s"]) == (0.5, 1.5)

"""The cells of the end-to-end benchmark: their order, their configuration, their latencies."""

from pathlib import Path

import pytest

from configs.load import ConfigError, load
from configs.runtime.process import REPOSITORY
from scripts.bench.end_to_end.plan import (
    TAIL,
    Cell,
    cells,
    latency_of,
    quick_cells,
    scaled,
)
from scripts.bench.end_to_end.task import DEMO, LATENCIES, WIKI, TaskFiles
from scripts.bench.overlap.server import Latency, chance

FILES = TaskFiles(
    *(Path(f"/files/{name}") for name in ("model", "settled", "train", "eval", "passages"))
)


def test_a_quick_plan_has_six_cells_with_every_ratio_s_both_sides() -> None:
    planned = list(quick_cells(DEMO, 3, 8))
    assert len(planned) == len(set(planned)) == 6
    by_latency = {name: {c.mode for c in planned if c.latency == name} for name in LATENCIES}
    assert by_latency["tail"] == {"lockstep_2_engines", "sync_2_engines", DEMO.headline}
    assert by_latency["scaled"] == {DEMO.headline}
    assert by_latency["zero"] == {"sync", DEMO.headline}
    assert sum(c.about_s for c in planned) + DEMO.parts_s <= 600.0
    assert {(c.seed, c.steps) for c in planned} == {(3, 8)}
    # What was rolled out ahead of the first step is used up before one counts.
    assert {(c.mode, c.last) for c in planned} == {
        ("lockstep_2_engines", 10),
        ("sync_2_engines", 10),
        ("sync", 10),
        (DEMO.headline, 18),
    }


def test_modes_lie_beside_each_other_and_turn_around_with_the_seed() -> None:
    planned = list(cells(DEMO, ("lockstep", "async_2"), ("tail", "zero"), (0, 1), 4))
    assert [(c.seed, c.latency, c.mode, c.learns) for c in planned[:6]] == [
        (0, "tail", "lockstep", False),
        (0, "tail", "async_2", False),
        (0, "zero", "lockstep", False),
        (0, "zero", "async_2", False),
        (0, "tail", "lockstep", True),
        (0, "tail", "async_2", True),
    ]
    assert [c.mode for c in planned[6:8]] == ["async_2", "lockstep"]
    assert len(set(planned)) == len(planned) == 12


def test_a_part_of_the_plan_can_be_asked_for() -> None:
    pace = list(cells(DEMO, ("sync",), LATENCIES, (0,), 4, "pace"))
    whole = list(cells(DEMO, ("sync",), LATENCIES, (0,), 4, "em"))
    assert [c.learns for c in pace] == [False] * 3
    assert [(c.latency, c.last) for c in whole] == [("tail", DEMO.em_steps)]


@pytest.mark.parametrize("mode", DEMO.modes)
def test_a_whole_run_is_told_as_long_as_it_takes_and_fits_a_slice(mode: str) -> None:
    pace, whole = cells(DEMO, (mode,), ("tail",), (0,), DEMO.steps)
    assert pace.about_s < whole.about_s == DEMO.em_s[DEMO.modes[mode].kind] < 30 * 60


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="--modes 'asink': one of lockstep, lockstep_2_engines"):
        list(cells(DEMO, ("asink",), LATENCIES, (0,), 4))


def test_the_wiki_task_has_fewer_and_shorter_cells_within_two_slices() -> None:
    planned = list(cells(WIKI, tuple(WIKI.modes), WIKI.latencies, WIKI.seeds, WIKI.steps))
    assert [(c.mode, c.latency, c.last, c.learns) for c in planned] == [
        ("lockstep", "tail", 5, False),
        ("sync", "tail", 5, False),
        ("async_2", "tail", 7, False),
    ]
    assert sum(c.about_s for c in planned) + WIKI.parts_s <= 2 * 30 * 60
    assert list(quick_cells(WIKI, 0, 1)) == []


@pytest.mark.parametrize("mode", WIKI.modes)
def test_a_wiki_cell_is_the_wiki_task_but_for_its_schedule(mode: str) -> None:
    overrides = Cell("wiki", mode, "tail", 1, 4).overrides(FILES, "http://h:1/0.2-2")
    config, wiki = load(WIKI.config, overrides), load(WIKI.config)
    assert config.replay.max_staleness == (wiki.replay.max_staleness if mode == "async_2" else 0)
    assert (
        (config.learner.threads, config.actors.threads)
        == (2, 2)
        == (
            wiki.learner.threads,
            wiki.actors.threads,
        )
    )
    for name in ("count", "max_num_seqs", "rollouts_in_flight", "max_turns"):
        assert getattr(config.actors, name) == getattr(wiki.actors, name)
    assert config.replay.groups_per_step * config.replay.group_size == 32
    assert (config.learner.lr, config.model.path) == (0.0, "/files/settled")
    assert not config.starts_retrieval_server


def test_an_engine_alone_has_as_many_rollouts_as_seats() -> None:
    assert (DEMO.engines, DEMO.in_flight_alone) == (1, 256)
    assert (WIKI.engines, WIKI.in_flight_alone) == (1, 64)


@pytest.mark.parametrize("mode", DEMO.modes)
@pytest.mark.parametrize("learns", [False, True])
def test_a_cell_is_the_demo_but_for_its_schedule(mode: str, learns: bool) -> None:
    overrides = Cell("demo", mode, "tail", 1, 4, learns).overrides(FILES, "http://h:1/0.2-2")
    config = load(REPOSITORY / "configs" / "demo.yaml", overrides)
    demo = load(REPOSITORY / "configs" / "demo.yaml")
    assert config.replay.max_staleness == DEMO.modes[mode].staleness
    assert config.learner.threads == DEMO.modes[mode].threads
    assert config.actors.max_num_seqs * config.actors.count == 256
    assert config.actors.count == DEMO.modes[mode].engines
    assert config.learner.lr == (demo.learner.lr if learns else 0.0)
    assert config.actors.rollouts_in_flight == DEMO.in_flight
    assert config.replay.group_size == demo.replay.group_size
    assert config.replay.drop_no_signal == learns
    assert config.learner.total_steps == (80 if learns else 6 + 2 * DEMO.modes[mode].staleness + 1)
    assert not config.starts_retrieval_server


def test_own_overrides_come_last() -> None:
    cell = Cell("demo", "sync", "tail", 1, 4)
    overrides = cell.overrides(FILES, "http://h:1", ("learner.threads=7",))
    assert load(REPOSITORY / "configs" / "demo.yaml", overrides).learner.threads == 7


def test_a_scaled_latency_is_a_share_of_a_turn() -> None:
    latency = scaled(0.5)
    assert latency.p99_s / latency.p50_s == pytest.approx(TAIL.p99_s / TAIL.p50_s)
    drawn = [latency.draw(chance(0, f"{number}")) for number in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.05 * 0.5, rel=0.1)
    assert latency_of("scaled", 0.5) == latency and latency_of("tail", 0.5) == TAIL


@pytest.mark.parametrize("turn_s", [1e-3, 0.08, 3.0])
def test_a_scaled_latency_survives_its_path(turn_s: float) -> None:
    latency = scaled(turn_s)
    again = Latency.of(latency.path)
    assert again.p50_s == pytest.approx(latency.p50_s, rel=1e-4)

"""The simulation of a run, against what a hand reckons."""

from dataclasses import replace
from itertools import pairwise

import pytest
from pytest import approx

from scripts.plan.outcome import Outcome
from scripts.plan.scenario import Machine, Scenario, Sync
from scripts.plan.simulation import simulate, unheld
from scripts.plan.workload import Latency, Shape, Turn, Workload, alike
from tests.scripts.plan.scenarios import scenario, varied

ONE_TURN = alike(10, [Turn(100)])


def run(of: Scenario, steps: int = 10, warm_up: int = 4, seed: int = 0) -> Outcome:
    return simulate(of, steps=steps, warm_up=warm_up, seed=seed)


def test_a_lock_step_is_the_sum_of_its_phases() -> None:
    found = run(scenario(prefill_s=1e-3, publish_s=0.2, sync=Sync(0.3, 0.1)))
    # 16 prompts of 10 tokens and, later, 16 observations of 20 stop everybody.
    rollouts_s = 0.16 + 0.5 + 0.5 + 0.32 + 0.3
    assert found.step_s == approx(1.0 + 0.2 + 0.3 + 0.1 + rollouts_s)
    assert (found.update_s, found.rest_s) == (approx(1.0), approx(0.2))
    assert found.wait_s == approx(0.4 + rollouts_s)
    assert found.trained_per_s == found.sampled_per_s == approx(16 * 80 / found.step_s)
    assert found.searches_per_s == approx(16 / found.step_s)
    assert (found.staleness, found.staleness_max) == (0.0, 0)
    assert found.learner_idle == approx(1 - 1 / found.step_s)


def test_a_learner_that_is_the_slower_side_never_waits() -> None:
    found = run(scenario(ONE_TURN, update_s=5.0, staleness=2))
    assert (found.learner_idle, found.wait_s) == (approx(0.0), approx(0.0))
    assert found.step_s == approx(5.0)
    assert found.trained_per_s == approx(16 * 100 / 5.0)


def test_engines_that_are_the_slower_side_are_never_idle() -> None:
    found = run(scenario(ONE_TURN, capacity=16, update_s=0.0, staleness=4), steps=20)
    assert found.engine_idle == approx(0.0)
    assert found.sampled_per_s == approx(16 / 0.01)


def test_a_token_costs_what_runs_beside_it() -> None:
    alone = run(scenario(ONE_TURN, groups=1, sequence_s=0.005))
    assert alone.wait_s == approx(100 * (0.01 + 4 * 0.005))


def test_turns_queue_for_seats_the_oldest_first() -> None:
    found = run(scenario(ONE_TURN, seats=4, update_s=0.0))
    assert found.step_s == approx(4 * 1.0)  # four groups, one after the other


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("update_s", [0.1, 4.0, 30.0])
def test_staleness_never_exceeds_its_bound(staleness: int, update_s: float) -> None:
    of = scenario(varied(), actors=3, capacity=32, update_s=update_s, staleness=staleness,
                  sync=Sync(0.5, 0.05))  # fmt: skip
    found = run(of)
    assert found.staleness_max <= staleness
    assert 0.0 <= found.staleness <= found.before_queue + found.in_queue <= staleness


def test_more_actors_never_give_fewer_tokens() -> None:
    rates = [
        run(scenario(varied(), actors=n, capacity=8, update_s=3.0, staleness=3)).trained_per_s
        for n in (1, 2, 4, 8, 16)
    ]
    assert all(b >= a * 0.99 for a, b in pairwise(rates))
    assert rates[1] > 1.8 * rates[0]


def test_a_version_has_contexts_computed_anew_unless_they_are_kept() -> None:
    of = scenario(ONE_TURN, capacity=16, update_s=0.3, staleness=8, prefill_s=1e-3)
    anew, kept = run(of), run(replace(of, rules=replace(of.rules, recompute=False)))
    assert anew.anew_share > 0.05 and kept.anew_share == 0.0
    assert anew.trained_per_s < kept.trained_per_s


def test_versions_that_come_seldom_cost_less() -> None:
    of = scenario(ONE_TURN, update_s=0.5, staleness=8, sync=Sync(0.0, 0.2))
    fourth = replace(of, rules=replace(of.rules, publish_every=4))
    assert run(of, 40, 16).pause_s == approx(0.2)
    assert run(fourth, 40, 16).pause_s == approx(0.05)


def test_groups_without_signal_are_sampled_and_not_trained() -> None:
    of = scenario(varied(no_signal=0.5), update_s=0.0, staleness=2)
    found = run(of, steps=60)
    assert found.trained_per_s / found.sampled_per_s == approx(0.5, abs=0.08)


def test_a_full_replay_server_is_the_bound() -> None:
    of = scenario(alike(10, [Turn(1)]), capacity=16, update_s=0.0, staleness=4, delivery_s=0.1)
    found = run(of)
    assert found.rollouts_per_s == approx(10.0, rel=0.02)
    assert found.acknowledged_s == approx(1.6, rel=0.1)  # all 16 stand in its queue


def test_cores_are_shared_out_among_all_who_work() -> None:
    one = scenario(ONE_TURN, capacity=16, update_s=1.0, staleness=4, machine=Machine(cores=1))
    both = run(one, 20)  # a step takes a second of the learner's work, and one of the engine's
    assert both.step_s == approx(2.0, rel=0.05)
    two = run(replace(one, machine=Machine(cores=2)), 20)
    assert two.step_s == approx(1.0, rel=0.05)
    beside = run(replace(one, machine=Machine(cores=2, beside=1.5)), 20)
    assert beside.step_s == approx(4 / 3, rel=0.05)  # a third of its second is left after an update


def test_the_learners_threads_come_before_the_engines() -> None:
    """On one core with three shares of four it takes 4/3 s for its second; engines have the rest,
    and all of it while it waits.
    """
    alone = scenario(ONE_TURN, capacity=16, update_s=1.0, staleness=4, machine=Machine(cores=1))
    found = run(replace(alone, machine=Machine(cores=1, favour=3.0)), 20)
    assert found.update_s == approx(4 / 3, rel=0.02)
    assert found.step_s == approx(2.0, rel=0.05), "no work is lost"
    assert run(alone, 20).update_s == approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("cores", "engines", "learner", "paces"),
    [
        (2.0, 1.0, 1.0, (1.0, 1.0)),  # room for all
        (2.0, 4.0, 0.0, (0.5, 0.5)),
        (2.0, 1.5, 1.0, (2 / 3, 1.0)),  # 3/4.5 of two cores are more than it can use
        (2.0, 6.0, 1.0, (4 / 3 / 6, 2 / 3)),
        (1.0, 0.5, 4.0, (1 / 25 / 0.5, 24 / 25 / 4)),
    ],
)
def test_cores_are_shared_by_weight(
    cores: float, engines: float, learner: float, paces: tuple[float, float]
) -> None:
    assert Machine(cores, favour=3.0).paces(engines, learner) == approx(paces)


def test_what_the_learner_leaves_while_it_stands_in_line_is_the_engines() -> None:
    machine = Machine(2.0, queued=1.25, favour=3.0)
    assert machine.paces(1.5, 1.0) == approx((0.8, 0.8))
    assert machine.paces(1.0, 1.0) == (1.0, 1.0), "nobody stands in line"


def test_what_siblings_share_is_taken_in_once() -> None:
    """Of 40 tokens 32 are a sibling's too: one of four takes them in, and each its last eight."""
    shared = Workload((Shape(40, (Turn(10, shared=32),)),))
    apart = alike(40, [Turn(10)])
    one, four = (
        run(scenario(each, groups=1, size=4, update_s=0.0, prefill_s=0.001)).step_s
        for each in (shared, apart)
    )
    assert four - one == approx(4 * 32 * 0.001 * 3 / 4)


def test_of_its_own_earlier_turns_a_rollout_finds_whole_blocks() -> None:
    turns = alike(10, [Turn(10, 10, searches=True), Turn(10)])
    of = scenario(turns, groups=1, size=1, update_s=0.0, prefill_s=0.001)
    whole, never = (replace(of, engines=replace(of.engines, block=n)) for n in (16, 1 << 40))
    assert run(whole).step_s - run(of).step_s == approx(0.004)  # of 20 tokens 16 are found
    assert run(never).step_s - run(of).step_s == approx(0.020)


def test_engines_slow_each_other_down_too() -> None:
    one = scenario(ONE_TURN, capacity=16, update_s=0.0, machine=Machine(cores=2, beside=1.5))
    assert run(one).step_s == approx(1.0)
    two = scenario(ONE_TURN, actors=2, capacity=8, update_s=0.0, machine=one.machine)
    assert run(two).step_s == approx(1.5)


def test_a_search_takes_something_beside_its_latency() -> None:
    of = scenario()
    more = replace(of, workload=replace(of.workload, beside_s=0.25))
    assert run(more).step_s == approx(run(of).step_s + 0.25)


def test_siblings_that_ask_the_same_are_answered_together() -> None:
    late = Latency(0.2, 2.0)
    shapes = (alike(10, [Turn(1, 20, True, n), Turn(1)]).shapes for n in (0, 1))
    scenarios = (scenario(Workload(of, late), groups=1, size=16, update_s=0.0) for of in shapes)
    apart, together = (run(of, 100) for of in scenarios)
    assert together.step_s == approx(late.mean_s + 0.02, rel=0.25)
    assert apart.step_s > 2 * together.step_s  # the latest of sixteen


def test_a_lock_step_shares_no_cores() -> None:
    one, many = (run(scenario(machine=Machine(cores=n))) for n in (1, 64))
    assert one.step_s == approx(many.step_s)


def test_nothing_holds_up_what_is_unheld() -> None:
    held = scenario(ONE_TURN, actors=3, capacity=16, update_s=9.0)
    assert unheld(held, steps=20).rollouts_per_s == approx(3 * 16.0, rel=0.05)


def test_equal_seeds_give_equal_runs() -> None:
    of = scenario(varied(), staleness=2)
    assert run(of, seed=1) == run(of, seed=1) != run(of, seed=2)


def test_all_that_is_sampled_is_trained_once() -> None:
    found = simulate(scenario(varied(), update_s=0.5, staleness=2), steps=30, warm_up=0)
    assert found.trained_per_s <= found.sampled_per_s
    assert found.rollouts_per_s * found.step_s >= 16


@pytest.mark.timeout(20)
@pytest.mark.parametrize("update_s", [1e6, 1e8])
def test_turns_end_where_the_clock_is_too_coarse_for_a_token(update_s: float) -> None:
    of = scenario(varied(), actors=3, capacity=32, update_s=update_s, staleness=3, prefill_s=1e-3)
    assert run(of).step_s == approx(update_s, rel=1e-3)

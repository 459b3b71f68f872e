"""vLLM's own scheduler, too many rollouts in flight: who is served first, and what it saves.

vLLM takes longer to import than these take to run: nobody does who only collects them.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from scripts.bench.engine.bench import CACHES, FIXED, UPDATE_S

if TYPE_CHECKING:
    from scripts.bench.engine.simulation import Figures, Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def planned(**settings: Any) -> "Plan":
    from scripts.bench.engine.simulation import Plan

    return Plan(**settings)


def simulate(plan: "Plan") -> "Figures":
    from scripts.bench.engine.simulation import simulate

    return simulate(plan)


@pytest.fixture
def crowded() -> "Plan":
    return planned(in_flight=80, warm_up_s=0.0, seconds=8.0, update_every_s=4.0)


def one_batch_s(plan: "Plan") -> float:
    return plan.machine.step_s + plan.machine.batch_tokens * plan.machine.token_s


def test_the_probe_is_answered_in_the_first_batch_after_an_update(crowded: "Plan") -> None:
    found = simulate(crowded)
    assert 0.0 < found.probe_wait_s <= 0.3
    assert found.probe_wait_s <= one_batch_s(crowded) + 1e-9


def test_a_probe_that_preempts_nobody_waits_for_the_first_seat_alone(crowded: "Plan") -> None:
    """`in_flight: keep`: 32 seats, all taken, and each completion takes some four seconds."""
    found = simulate(replace(crowded, keep=True, seconds=21.0))
    assert one_batch_s(crowded) < found.probe_wait_s <= 1.0


def test_what_an_update_preempts_is_none_of_the_preemptions(crowded: "Plan") -> None:
    assert simulate(crowded).preemptions == 0
    starved = replace(crowded, update_every_s=0.0, in_flight=32, seconds=15.0).on(10_000)
    assert simulate(replace(starved, by_priority=False)).preemptions > 0


@pytest.mark.parametrize(("every_s", "goal"), [(0.0, 1.7), (UPDATE_S, 1.5)])
def test_the_oldest_first_saves_what_evicted_prefixes_cost(every_s: float, goal: float) -> None:
    def rate(by_priority: bool) -> "Figures":
        plan = planned(update_every_s=every_s).crowded()
        return simulate(replace(plan, by_priority=by_priority))

    ours, theirs = rate(True), rate(False)
    assert ours.rollouts_per_s >= goal * theirs.rollouts_per_s
    assert ours.probe_wait_s <= 0.3
    assert theirs.probe_wait_s > 30.0 or not every_s  # behind everything that was preempted


@pytest.mark.soak("benchmarks")
def test_capacity_settles_at_the_best_fixed_number_without_preemptions() -> None:
    from scripts.bench.engine.simulation import fixed_beside_found

    found = fixed_beside_found(planned().on(CACHES["half"]), FIXED)
    assert found["capacity"] == pytest.approx(found["best_fixed"], rel=0.15)
    assert found["rate_over_best"] >= 0.9
    assert 1000 * found["preemptions"] <= found["rollouts"]  # none, of the 560 that there are

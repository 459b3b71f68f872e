"""An engine's own statistics become gauges and load; what updates preempt is set down to them."""

from types import SimpleNamespace
from typing import Any

from actors.policies.capacity import Load
from actors.policies.statistics import EngineStatistics


def step(
    to: EngineStatistics, use: float = 0.5, running: int = 4, queued: int = 0, preempted: int = 0,
    found: tuple[int, int, int] = (0, 0, 0), again: tuple[int, int, int] = (0, 0, 0),
    drafts: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """A step as vLLM tells it; `found`, `again`: requests, tokens asked for, tokens cached;
    `drafts`: tokens drafted and accepted.
    """
    drafting = drafts and SimpleNamespace(num_draft_tokens=drafts[0], num_accepted_tokens=drafts[1])
    cache: Any = SimpleNamespace(
        requests=found[0], queries=found[1], hits=found[2],
        preempted_requests=again[0], preempted_queries=again[1], preempted_hits=again[2],
    )  # fmt: skip
    scheduler = SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=queued, kv_cache_usage=use,
        prefix_cache_stats=cache, spec_decoding_stats=drafting,
    )  # fmt: skip
    to.record(scheduler, SimpleNamespace(num_preempted_reqs=preempted))


def test_load_and_peak_are_since_the_last_look() -> None:
    told = EngineStatistics()
    step(told, 0.4)
    step(told, 0.9, queued=3)
    step(told, 0.6, preempted=2)
    assert told.take_load() == Load(0.9, 2, 3, 1) and told.take_load() == Load()
    gauges = told.gauges()
    assert gauges["actor/kv_use_max"] == 0.9 and told.gauges()["actor/kv_use_max"] == 0.0
    assert gauges["actor/preemptions_total"] == 2.0 and gauges["actor/queued_requests"] == 0.0
    step(told, running=3, queued=2)
    gauges = told.gauges()
    assert gauges["actor/running_requests"] == 3.0 and gauges["actor/queued_requests"] == 2.0


def test_a_step_s_requests_are_the_mean_since_the_last_look() -> None:
    told = EngineStatistics()
    assert "actor/requests_a_step" not in told.gauges()
    step(told, running=5)
    step(told, running=1)
    assert told.gauges()["actor/requests_a_step"] == 3.0
    step(told, running=7)
    assert told.gauges()["actor/requests_a_step"] == 7.0


def test_what_an_update_preempts_is_no_preemption() -> None:
    told = EngineStatistics()
    step(told, running=5)
    told.updated()
    step(told, running=5, preempted=3)
    step(told, running=5, preempted=4)  # two of them for want of room
    assert told.preemptions == 2 and told.take_load().preemptions == 2


def test_what_was_aborted_after_an_update_excuses_little_for_ever() -> None:
    told = EngineStatistics()
    for _ in range(100):
        step(told, running=5)
        told.updated()
    step(told, running=5, preempted=11)
    assert told.preemptions == 1


def test_tokens_prefilled_again_are_those_of_requests_that_an_update_preempted() -> None:
    told = EngineStatistics()
    step(told, running=2)
    told.updated()
    step(told, again=(1, 1000, 200))
    step(told, again=(2, 1000, 0))  # one of these had been preempted for want of room
    step(told, again=(1, 700, 0))
    assert told.gauges()["sync/prefilled_again_tokens_total"] == 1300.0


def test_the_hit_rate_is_of_the_last_requests() -> None:
    told = EngineStatistics()
    assert told.gauges()["actor/prefix_hit_rate"] == 0.0
    for _ in range(1000):
        step(told, found=(1, 100, 0))
    for _ in range(500):
        step(told, found=(1, 100, 80))
    assert told.gauges()["actor/prefix_hit_rate"] == 0.4


def test_steps_without_news_of_the_scheduler_are_none() -> None:
    told = EngineStatistics()
    told.record(None, None)
    assert told.take_load() == Load()


def test_the_share_of_accepted_drafts_is_of_the_last_steps() -> None:
    told = EngineStatistics()
    step(told)
    assert "actor/accepted_drafts" not in told.gauges()  # the engine drafts nothing
    for _ in range(1000):
        step(told, drafts=(3, 0))
    for _ in range(500):
        step(told, drafts=(3, 3))
        step(told)
    assert told.gauges()["actor/accepted_drafts"] == 0.5

"""Deliveries, batches and the order of groups in them."""

from typing import Any

import msgspec

from replay.log.records import Superseded
from replay.protocol import (
    Batch,
    Committed,
    Deliver,
    Done,
    Heartbeat,
    Observe,
    Ready,
    Refused,
    Report,
    Wait,
)


def test_a_batch_holds_whole_groups_ordered_by_id(scene: Any) -> None:
    s = scene()
    s.learner()
    s.actor("a", 4)
    for lease in reversed(list(s.leased["a"])):
        s.deliver("a", lease)
    batch = s.sample(0)
    assert (batch.step, batch.group_ids, batch.versions) == (1, (1, 2), (0, 0))
    assert [len(group) for group in batch.groups] == [2, 2]


def test_payloads_are_ordered_by_sibling(scene: Any) -> None:
    s = scene()
    s.learner()
    s.actor("a", 4)
    for lease in reversed(list(s.leased["a"])):
        s.deliver("a", lease)
    siblings = [msgspec.msgpack.decode(p)["sibling"] for p in s.sample(0).groups[0]]
    assert siblings == [0, 1]


def test_a_repeated_sample_returns_the_same_batch(scene: Any) -> None:
    s = scene()
    s.learner()
    s.actor("a", 100)
    s.deliver_all("a")
    first = s.sample(0)
    s.send("a", Ready("a", 100, 1, 1))
    s.deliver_all("a", version=1)
    assert s.sample(0) == first
    assert s.sample(1).group_ids == (3, 4)


def test_a_batch_waits_for_enough_groups_and_says_for_whom(scene: Any) -> None:
    s = scene()
    s.learner()
    s.actor("a", 4)
    s.deliver("a", s.leased["a"][0])
    s.tick(41)
    wait = s.sample(0)
    assert not wait.oldest
    assert wait.reason.startswith("step 1: 0 of 2 groups ready; oldest unfinished: ")
    assert "group 1 (version 0, opened 41 s ago) on a: 1 of 2 siblings missing" in wait.reason


def test_an_older_unfinished_group_is_waited_for(scene: Any) -> None:
    s = scene(max_staleness=1)
    s.learner(step=1)
    s.actor("a", 2)
    s.actor("b", 4, version=1)
    s.deliver_all("b", version=1)
    wait = s.sample(1)
    assert isinstance(wait, Wait)
    assert wait.oldest
    assert "group 1 (version 0" in wait.reason
    s.deliver_all("a")
    assert s.sample(1).versions == (0, 1)


def test_a_duplicate_is_superseded_and_counted(scene: Any) -> None:
    s = scene()
    s.learner()
    s.actor("a", 2)
    lease = s.leased["a"][0]
    assert s.deliver("a", lease) == "accepted"
    assert s.deliver("a", lease, reward=7.0) == "superseded"
    assert s.ledger.gauges()["replay/superseded"] == 1
    assert isinstance(s.log[-1], Superseded)


def test_a_duplicate_of_a_trained_group_is_superseded(scene: Any) -> None:
    s = scene(groups_per_step=1)
    s.learner()
    s.actor("a", 2)
    lease = s.leased["a"][0]
    s.deliver_all("a")
    s.sample(0)
    assert s.deliver("a", lease) == "superseded"
    s.send("learner", Committed(1, 1))
    assert s.deliver("a", lease) == "superseded"


def test_a_delivery_that_is_not_its_leases_is_refused(scene: Any, tools: Any) -> None:
    s = scene()
    s.learner()
    s.actor("a", 4)
    first, second, third, _ = s.leased["a"]
    payload = msgspec.msgpack.encode(tools.summary_for(first))
    for foreign in (second, third):
        reply = s.send("a", Deliver("a", foreign.group_id, foreign.sibling, payload))
        assert isinstance(reply, Refused)
    assert isinstance(s.send("a", Deliver("a", 99, 0, payload)), Refused)


def test_tokens_older_than_the_groups_version_are_not_trained(scene: Any) -> None:
    s = scene()
    s.learner(step=1)
    s.actor("a", 2, version=1)
    assert s.deliver("a", s.leased["a"][0], version=0) == "dropped"
    assert len(s.leased["a"]) == 2
    assert "version 0 < 1" in str(s.log)


def test_committed_steps_are_forgotten(scene: Any) -> None:
    s = scene(groups_per_step=1)
    s.learner()
    s.actor("a", 100)
    s.train("a", 3)
    assert s.send("learner", Committed(1, 2)) == Done()
    assert list(s.ledger.state.batches) == [3]
    assert list(s.ledger.state.sampled) == [3]
    assert isinstance(s.sample(0), Refused)


def test_a_step_out_of_order_is_refused(scene: Any) -> None:
    s = scene()
    s.learner()
    assert "step 1 comes next" in s.sample(3).cause
    assert isinstance(s.send("learner", Committed(1, 1)), Refused)


def test_a_learner_that_has_not_resumed_is_refused(scene: Any) -> None:
    assert "say Resume" in scene().sample(0).cause


def test_groups_without_signal_are_dropped_where_configured(scene: Any) -> None:
    s = scene(drop_no_signal=True)
    s.learner()
    s.actor("a", 4)
    s.deliver_all("a", reward=1.0)
    assert s.dropped == {"no_signal": 2}
    assert len(s.ledger.state.opened) == 2
    s.deliver_all("a")
    assert s.sample(0).group_ids == (3, 4)


def test_fewer_than_two_scorable_siblings_are_no_signal(scene: Any, tools: Any) -> None:
    s = scene(drop_no_signal=True)
    s.learner()
    s.actor("a", 2)
    unscorable, scorable = s.leased["a"]
    summary = tools.summary_for(unscorable)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(summary, reward=None))
    s.send("a", Deliver("a", unscorable.group_id, unscorable.sibling, payload))
    s.deliver("a", scorable)
    assert s.dropped == {"no_signal": 1}


def test_a_group_that_nobody_could_score_is_not_trained(scene: Any, tools: Any) -> None:
    s = scene(drop_no_signal=False, groups_per_step=1)
    s.learner()
    s.actor("a", 2)
    for lease in list(s.leased["a"]):
        summary = msgspec.structs.replace(tools.summary_for(lease), reward=None)
        payload = msgspec.msgpack.encode(summary)
        s.send("a", Deliver("a", lease.group_id, lease.sibling, payload))
    assert s.dropped == {"unscorable": 1}
    assert not s.ledger.state.ready and not s.ledger.state.questions.retired
    said = "step 1: 0 of 1 groups ready (1 were unscorable so far: the actors' logs say why)"
    assert s.sample(0).reason.startswith(said)


def test_gauges_are_means_since_the_last_batch(scene: Any) -> None:
    s = scene(groups_per_step=1)
    s.learner()
    s.actor("a", 2)
    s.deliver("a", s.leased["a"][0], searches=3, malformed=1, turns=4)
    s.deliver("a", s.leased["a"][0], searches=1, malformed=0, turns=4, sequences=3)
    gauges = s.sample(0).gauges
    assert gauges["actor/merged_whole"] == 0.5
    assert gauges["actor/reward"] == 0.5
    assert gauges["actor/searches_per_rollout"] == 2.0
    assert gauges["actor/malformed_fraction"] == 0.125
    assert gauges["replay/no_signal_fraction"] == 0.0
    assert gauges["replay/ready_groups"] == 1
    assert "actor/reward" not in s.ledger.gauges()


def test_what_is_trained_is_compared_with_what_was_delivered_by_number_of_searches(
    scene: Any,
) -> None:
    s = scene(groups_per_step=1, drop_no_signal=True)
    s.learner()
    s.actor("a", 100)
    dropped, trained = s.leased["a"][:2], s.leased["a"][2:4]
    for lease in list(dropped):
        s.deliver("a", lease, reward=0.0, searches=9)
    for lease in list(trained):
        s.deliver("a", lease, searches=1)
    s.sample(0)
    gauges = s.ledger.gauges()
    shares = [gauges[f"replay/delivered_share_searches_{n}"] for n in range(5)]
    assert shares == [0.0, 0.5, 0.0, 0.0, 0.5]
    assert gauges["replay/trained_share_searches_1"] == 1.0


def test_a_batch_brings_staleness_and_the_fleets_gauges(scene: Any) -> None:
    s = scene(groups_per_step=1)
    s.learner()
    s.actor("a", 100)
    s.send("a", Heartbeat("a", {"actor/tokens_per_s": 7.0}))
    s.deliver_all("a")
    assert s.sample(0).fleet == {"a": {"actor/tokens_per_s": 7.0}}
    assert s.sample(1).gauges["replay/staleness"] == 1


def test_reports_are_observed_from_a_count_on(scene: Any) -> None:
    s = scene()
    s.learner()
    for step in (0, 1):
        s.send("learner", Report(1, step, {"learner/loss": step / 2}))
    status = s.send("console", Observe(1, 0))
    assert [(r.step, r.gauges) for r in status.steps] == [(1, {"learner/loss": 0.5})]


def test_status_names_the_phase(scene: Any) -> None:
    s = scene(groups_per_step=1)
    assert s.send("console", Observe(0, 0)).phase == "waiting for a learner"
    s.learner()
    s.sample(0)
    assert "no actor has said hello" in s.send("console", Observe(0, 0)).phase
    s.actor("a", 2)
    s.deliver_all("a")
    assert isinstance(s.sample(0), Batch)
    assert s.send("console", Observe(0, 0)).phase == "learner trains step 1"

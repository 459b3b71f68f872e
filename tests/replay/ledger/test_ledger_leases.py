"""Leases: who is given them, how many, and who is turned away."""

from typing import Any

from replay.ledger.events import PeerLost
from replay.log.records import Leased
from replay.protocol import Goodbye, Heartbeat, Hello, LeaseFailed, Ready, Unknown, Welcome


def test_nothing_is_leased_before_a_learner_has_resumed(scene: Any) -> None:
    s = scene()
    s.actor("a", 8)
    assert not s.leased
    s.learner()
    assert len(s.leased["a"]) == 8


def test_siblings_are_leased_together_to_one_actor(scene: Any) -> None:
    s = scene(group_size=3)
    s.learner()
    s.actor("a", 5)
    s.actor("b", 3)
    assert {(x.group_id, x.sibling) for x in s.leased["a"]} == {(1, 0), (1, 1), (1, 2)}
    assert {x.group_id for x in s.leased["b"]} == {2}


def test_a_lease_carries_question_kind_and_sampling(scene: Any) -> None:
    s = scene()
    s.learner()
    s.actor("a", 2)
    lease = s.leased["a"][0]
    assert lease.kind == "train"
    assert lease.question.answers
    assert (lease.sampling.temperature, lease.sampling.seed) == (0.9, 5)


def test_a_lease_is_on_record_with_its_attempts_and_its_actors_node(scene: Any) -> None:
    s = scene(group_size=2)
    s.learner()
    s.send("a", Hello("a", "digest", node="host-1"))
    s.send("a", Ready("a", 2, 1, 0))
    (leased,) = (record for record in s.log if isinstance(record, Leased))
    assert (leased.siblings, leased.attempts, leased.node) == ((0, 1), (0, 0), "host-1")
    s.send("a", LeaseFailed("a", leased.group_id, 0, "ToolFailed: it broke"))
    _, again = (record for record in s.log if isinstance(record, Leased))
    assert (again.siblings, again.attempts) == ((0,), (1,))


def test_admission_bounds_what_is_opened(scene: Any) -> None:
    s = scene(max_staleness=1, groups_per_step=2)
    s.learner(step=1)
    s.actor("a", 100)
    assert len(s.ledger.state.opened) == 2
    s.send("a", Ready("a", 100, 1, 1))
    assert len(s.ledger.state.opened) == 4


def test_admission_counts_sampled_groups(scene: Any) -> None:
    s = scene(max_staleness=1, groups_per_step=2)
    s.learner()
    s.actor("a", 100)
    s.deliver_all("a")
    s.sample(0)
    assert not s.leased["a"]


def test_capacity_counts_leases_not_answered_for(scene: Any) -> None:
    s = scene()
    s.learner()
    s.actor("a", 5)
    s.send("a", Ready("a", 5, 1, 0))
    assert len(s.leased["a"]) == 4
    s.deliver("a", s.leased["a"][0])
    assert len(s.leased["a"]) == 5


def test_the_roomiest_actor_is_served_first(scene: Any) -> None:
    s = scene(max_staleness=0, groups_per_step=2)
    s.actor("a", 2)
    s.actor("b", 9)
    s.learner()
    assert len(s.leased["b"]) == 4
    assert "a" not in s.leased


def test_an_actor_of_an_older_or_newer_incarnation_gets_nothing(scene: Any) -> None:
    s = scene()
    s.learner(incarnation=2)
    s.actor("old", 8, incarnation=1)
    s.actor("new", 8, incarnation=3)
    assert not s.leased
    s.send("old", Ready("old", 8, 2, 0))
    assert s.leased["old"]


def test_an_actor_id_in_use_is_refused(scene: Any) -> None:
    s = scene()
    s.actor("a", 8)
    assert "connected already" in s.send("other", Hello("a", "digest")).cause
    s.lose("a")
    assert s.send("other", Hello("a", "digest")) == Welcome()


def test_an_actor_may_come_back_on_another_connection(scene: Any) -> None:
    s = scene(groups_per_step=1)
    s.learner()
    s.actor("a", 2, instance="mine")
    again = Hello("a", "digest", ((1, 0), (1, 1)), instance="mine")
    assert s.send("moved", again) == Welcome()
    assert s.send("a", Heartbeat("a", {})) == Unknown()
    s.send("a", PeerLost())
    assert s.ledger.state.held["a"] == {(1, 0), (1, 1)}
    assert "connected already" in s.send("other", Hello("a", "digest", instance="another")).cause


def test_another_tokenizer_is_refused_also_after_a_restart(scene: Any) -> None:
    s = scene()
    s.actor("a", 8)
    s.restart()
    assert "tokenizer" in s.send("b", Hello("b", "another")).cause


def test_another_protocol_is_refused(scene: Any) -> None:
    assert "protocol" in scene().send("a", Hello("a", "digest", protocol=99)).cause


def test_a_stranger_is_told_to_say_hello(scene: Any) -> None:
    s = scene()
    for message in (Ready("a", 8, 1, 0), Heartbeat("a", {})):
        assert s.send("a", message) == Unknown()


def test_a_heartbeat_from_another_connection_changes_nothing(scene: Any) -> None:
    s = scene()
    s.actor("a", 8)
    assert s.send("thief", Heartbeat("a", {"x": 1.0})) == Unknown()
    s.send("thief", Goodbye("a"))
    s.learner()
    assert s.leased["a"]


def test_too_small_an_actor_is_named(scene: Any) -> None:
    s = scene(group_size=4)
    s.learner()
    s.actor("a", 3)
    assert "a has 3 of 3 rollouts free, a group needs 4" in s.sample(0).reason


def test_a_dropped_group_makes_room_for_another_actor(scene: Any) -> None:
    s = scene(groups_per_step=1, max_staleness=0, drop_no_signal=True)
    s.learner()
    s.actor("a", 2)
    s.actor("b", 2)
    assert "b" not in s.leased
    s.send("a", Ready("a", 0, 1, 0))  # it takes no more
    s.deliver_all("a", reward=1.0)
    assert [lease.group_id for lease in s.leased["b"]] == [2, 2]


def test_the_roomiest_actor_is_given_the_next_group(scene: Any) -> None:
    s = scene(groups_per_step=3, max_staleness=0)
    s.actor("a", 2)
    s.actor("b", 6)
    s.learner()
    opened = {name: [lease.group_id for lease in s.leased[name]] for name in s.leased}
    assert opened == {"b": [1, 1, 2, 2, 3, 3]}  # of equals, the last by name

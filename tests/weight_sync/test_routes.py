"""Who receives from the learner, and who from its node's relay."""

from weight_sync.routes import routes

CPU = ("cpu",)


def test_of_another_node_the_first_actor_receives_and_hands_on() -> None:
    nodes = {"a": "own", "b": "far", "c": "far", "d": "far", "e": "third"}
    found = routes(dict.fromkeys(nodes, CPU), nodes, "own", set())
    assert found.members == {"a": CPU, "b": CPU, "e": CPU}
    assert found.relays == {"b": ("c", "d")} and (found.remote, found.hops) == (2, 2)
    assert found.said() == "; b hands on to c, d"


def test_on_the_learner_s_node_each_receives_for_itself() -> None:
    found = routes({"a": CPU, "b": ("cpu", "cpu")}, {"a": "own", "b": "own"}, "own", set())
    assert found.members == {"a": CPU, "b": ("cpu", "cpu")} and not found.relays
    assert (found.remote, found.hops, found.said()) == (0, 1, "")


def test_of_an_engine_s_workers_on_another_node_the_first_receives() -> None:
    workers = ("cuda:1", "cuda:2")
    found = routes({"a": workers}, {"a": "far"}, "own", set())
    assert found.members == {"a": ("cuda:1",)} and found.relays == {"a": ()}
    assert found.remote == 1 and found.said() == "; a hands on to its workers"
    both = routes({"a": workers, "b": CPU}, {"a": "far", "b": "far"}, "own", set())
    assert both.members == {"a": ("cuda:1",)} and both.relays == {"a": ("b",)}


def test_on_a_node_apart_each_receives_for_itself() -> None:
    found = routes({"a": CPU, "b": CPU}, {"a": "far", "b": "far"}, "own", {"far"})
    assert set(found.members) == {"a", "b"} and not found.relays and found.remote == 2

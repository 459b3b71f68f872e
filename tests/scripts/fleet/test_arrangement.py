"""Who lies where, what each process is told, and what becomes of that when nodes go and come."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.load import ConfigError, parse
from scripts.fleet import cluster as module
from scripts.fleet.arrangement import Arrangement
from scripts.fleet.cluster import Cluster, NodeSeat
from scripts.fleet.nodes import Facts, Node, Surveyed
from scripts.fleet.placement import GIB, Need, NoRoom, Room

PORTS = (21_000, 21_001, 21_002, 21_003, 21_004)


def node(address: str, ahead_s: float = 0.0) -> Surveyed:
    facts = Facts({}, "/forage", {}, 4, 100 * GIB, (), GIB, GIB, PORTS, "", "")
    return Surveyed(Node(address, "", 0, 4.0), facts, ahead_s)


def arranged(
    tmp_path: Path, *nodes: str, found: dict[str, Surveyed] | None = None, **fields: Any
) -> Arrangement:
    """Two actors on these nodes, the launcher on the first."""
    words = [f"{name.replace('__', '.')}={value}" for name, value in fields.items()]
    fixed = (
        "cluster.address=auto",
        f"run_dir={tmp_path / 'run'}",
        "retrieval.corpus=/c.jsonl",
        "actors.count=2",
    )
    config = parse("", [*fixed, *words], "a test")
    return Arrangement(config, found or {at: node(at) for at in nodes}, nodes[0])


def test_each_process_is_told_the_endpoints_and_its_own_server_first(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", "c")
    assert plan.seats["actor-0"] == "b" and plan.seats["actor-1"] == "c"
    endpoints = ["replay.endpoint=tcp://a:21000", "weight_sync.endpoint=tcp://a:21001"]
    assert plan.words("learner")[:2] == endpoints
    servers = {at: f"http://{at}:21003" for at in "bc"}
    assert plan.words("actor-1")[-1] == f"retrieval.url=[{servers['c']},{servers['b']}]"
    own = ["retrieval.host=c", "retrieval.port=21003"]
    assert plan.words("retrieval_server-c")[-2:] == own
    assert plan.places() == {"a": [21_000, 21_001], "b": [21_003], "c": [21_003]}


def test_a_node_has_the_secrets_of_its_processes_and_no_others(tmp_path: Path) -> None:
    away = {"cluster__learner": "[b]", "cluster__actors": "[c]", "cluster__shared": tmp_path}
    plan = arranged(tmp_path, "a", "b", "c", **away)
    asks, leads = {"server.key", "actor.key_secret"}, {"server.key", "learner.key_secret"}
    assert plan.secrets("a") == {}  # they are here
    assert plan.secrets("b").keys() == leads | {"actor.key", "learner.key", "server.key_secret"}
    assert plan.secrets("c").keys() == asks | {"retrieval_token"}
    folder = plan.directory("c") / "keys"
    assert f"keys={folder}" in plan.words("actor-0")
    assert f"retrieval.token_file={folder}/retrieval_token" in plan.words("retrieval_server-c")
    assert not [word for word in plan.words("replay") if word.startswith("keys=")]
    plan.leave("actor-0")
    assert plan.secrets("c").keys() == asks | {"retrieval_token"}  # of the other one
    plan.leave("actor-1")
    assert plan.secrets("c").keys() == {"retrieval_token"}
    plan.leave("retrieval_server-c")
    assert plan.secrets("c") == {}


def test_ranks_on_several_nodes_are_told_where_to_meet(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", learner__ranks=2)
    assert not [word for word in plan.words("learner-1") if "rendezvous" in word]
    plan._seats.take("learner-1", "b")
    for rank in ("learner", "learner-1"):
        assert "learner.rendezvous=tcp://a:21002" in plan.words(rank)


def test_a_node_that_goes_leaves_its_processes_to_others(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", "c")
    plan.remove("c")
    with pytest.raises(NoRoom, match="node c is gone"):
        plan.seat("retrieval_server-c")
    assert plan.seat("actor-1") == "a"
    assert plan.beside(["actor-1"]) == ["retrieval_server-a"]
    plan.add(node("c"))
    assert plan.seat("retrieval_server-c") == "c" and plan.seat("actor-1") == "a"
    plan._seats.leave("actor-1")
    assert plan.seat("actor-1") == "c"


def test_who_has_left_for_good_leaves_its_seat_to_others(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", cluster__actors="[b]")
    plan._seats.add(Room(node("b").node, 0, 0))  # the two there have all of it
    with pytest.raises(NoRoom):
        plan.seat("actor-2")
    plan.leave("actor-0")
    assert "actor-0" not in plan.seats and plan.seat("actor-2") == "b"


def test_on_a_node_that_is_to_go_nothing_new_is_placed(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", "c")
    assert plan.close("c") == ""
    assert plan.seats["actor-1"] == "c"  # it drains there
    assert plan.seat("actor-1") == "a"
    with pytest.raises(NoRoom, match="node c is to go"):
        plan.seat("retrieval_server-c")
    plan.remove("c")
    plan.add(node("c"))
    assert plan.seat("retrieval_server-c") == "c"


def test_what_becomes_of_who_cannot_leave_is_said(tmp_path: Path) -> None:
    assert "end it (Ctrl-C)" in arranged(tmp_path, "a", "b").close("a")
    away = {"cluster__learner": "[b]", "cluster__actors": "[c]"}
    assert "set cluster.shared" in arranged(tmp_path, "a", "b", "c", **away).close("b")
    away["cluster__shared"] = str(tmp_path)
    plan = arranged(tmp_path, "a", "b", "c", **away)
    assert "its learner saves, and goes on elsewhere" in plan.close("b")
    with pytest.raises(NoRoom, match="no such node is there: name some of"):
        plan.seat("learner")


def test_a_learner_that_moves_is_looked_for_where_it_is(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", "c", cluster__shared=tmp_path, cluster__actors="[c]")
    before, at = plan.learner_word, plan.seats["learner"]
    plan.close(at)
    assert plan.seat("learner") != at and plan.learner_word != before
    assert plan.learner_word in plan.words("actor-0")


def test_a_learner_leaves_a_node_for_another_with_room_or_in_its_last_minutes(
    tmp_path: Path,
) -> None:
    away = {"cluster__learner": "[b,c]", "cluster__actors": "[c]", "cluster__shared": tmp_path}
    plan = arranged(tmp_path, "a", "b", "c", **away)
    assert not plan.learner_moves(60.0), "its node stays"
    plan.close("b")
    before = dict(plan.seats)
    assert plan.learner_moves(None) and plan.learner_moves(1e6) and plan.seats == before
    plan.close("c")
    assert not plan.learner_moves(None) and not plan.learner_moves(1e6), "nobody has room"
    assert plan.learner_moves(60.0)
    plan.close("a")
    assert not plan.learner_moves(60.0), "the run ends with the launcher's node"


def test_actors_leave_a_node_for_another_with_room_or_in_its_last_minute(tmp_path: Path) -> None:
    """A notice of an hour would else cost a run without a spare node its actors for that hour."""
    plan = arranged(tmp_path, "a", "b", "c", cluster__actors="[b,c]")
    plan._seats.take("actor-0", "b")
    plan._seats.take("actor-1", "b")
    plan._seats.add(Room(node("c").node, 0, 0))
    plan.close("b")
    before, hour = dict(plan.seats), {"actor-0": 3600.0, "actor-1": 3600.0}
    assert plan.actors_that_move(hour, []) == [] and plan.seats == before, "nobody has room"
    assert plan.actors_that_move({"actor-0": None}, []) == ["actor-0"], "its node may go at once"
    assert plan.actors_that_move({"actor-0": 51.0}, []) == []
    assert plan.actors_that_move({"actor-0": 50.0}, []) == ["actor-0"], "20 s to drain, and 30 s"
    plan._seats.add(Room(node("c").node, 0, plan._needs["actor"].memory_bytes))
    assert plan.actors_that_move(hour, []) == ["actor-0"], "there is room for one"


def test_room_that_a_learner_moves_into_is_no_actor_s(tmp_path: Path) -> None:
    away = {"cluster__learner": "[b,c]", "cluster__actors": "[b,c]", "cluster__shared": tmp_path}
    plan = arranged(tmp_path, "a", "b", "c", actors__count=1, **away)
    plan._seats.take("learner", "b")
    plan._seats.take("actor-0", "b")
    most = max(plan._needs[kind].memory_bytes for kind in ("learner", "actor"))
    plan._seats.add(Room(node("c").node, 0, most))
    plan.close("b")
    assert plan.learner_moves(3600.0) and plan.actors_that_move({"actor-0": 3600.0}, []) == []
    plan._seats.take("learner", "a")
    assert plan.actors_that_move({"actor-0": 3600.0}, []) == ["actor-0"]


def test_who_works_on_where_a_node_is_to_go_is_said_once(tmp_path: Path) -> None:
    cluster = object.__new__(Cluster)  # its other parts need a cluster
    asked, now = [], time.time()
    moves = SimpleNamespace(actors_that_move=lambda left, _: asked.append(left) or ["actor-0"])
    cluster.arrangement, cluster._stay, cluster._said = moves, set(), []
    cluster._watch = SimpleNamespace(events=list)
    ends = {"actor-0": 0.0, "actor-1": now + 60.0}
    assert [cluster.evicted(ends, []) for _ in range(2)] == [["actor-0"]] * 2
    assert asked[0]["actor-0"] is None and 50.0 < asked[0]["actor-1"] <= 60.0
    said = "actor-1 works on there for now: no other node has room for it"
    assert [cluster.news() for _ in range(2)] == [[said], []]


def test_a_learner_that_goes_on_nowhere_else_stays(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", "c", cluster__learner="[b]", cluster__actors="[c]")
    plan.close("b")
    assert not plan.learner_moves(60.0)


def test_the_node_that_goes_first_counts_for_its_learner(tmp_path: Path) -> None:
    cluster = object.__new__(Cluster)  # its other parts need a cluster
    asked, now = [], time.time()
    cluster.arrangement = SimpleNamespace(learner_moves=lambda left_s: asked.append(left_s) or True)
    cluster._seats = {}
    for name, leaves_at in (("learner", 0.0), ("learner-1", now + 60.0), ("actor-0", now + 9.0)):
        post = SimpleNamespace(leaving=f"node of {name} is to go", leaves_at=leaves_at, gone="")
        cluster._seats[name] = NodeSeat(post, tmp_path, 0)
    assert cluster.displaced() == "node of learner is to go"
    assert 50.0 < asked[0] <= 60.0
    cluster._seats["learner-1"].post.gone = "node b is gone"
    assert cluster.displaced() and asked[1] is None
    cluster._seats["learner"].post.leaving = ""
    assert cluster.displaced() == ""


def test_how_soon_a_node_goes_is_said_as_it_is_then(tmp_path: Path) -> None:
    """An actor may drain an hour after the notice."""
    post = SimpleNamespace(leaving="", leaves_at=0.0, gone="")
    seat: Any = NodeSeat(post, tmp_path, 0)
    assert seat.leaving == ""
    post.leaving = "node b is to go"
    assert seat.leaving == post.leaving
    for left_s in (3600, 50):
        post.leaves_at = time.time() + left_s
        assert seat.leaving in {f"node b is to go in {s} s" for s in (left_s - 1, left_s)}


def test_a_learner_that_runs_is_looked_for_where_it_is_until_it_ends(tmp_path: Path) -> None:
    away = {"cluster__learner": "[b,a]", "cluster__actors": "[c,a]", "cluster__shared": tmp_path}
    plan = arranged(tmp_path, "a", "b", "c", **away)
    cluster = object.__new__(Cluster)  # its other parts need a cluster
    cluster.arrangement = plan
    plan.close("b")
    assert cluster.room("actor-0") == "" and plan.seats["learner"] == "b"
    plan.remove("b")
    assert cluster.room("actor-0") == "" and plan.seats["learner"] == "a"


def test_a_node_that_comes_is_checked_for_what_it_may_have(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b")
    assert [*plan.problems_of(node("c"), [])] == [
        "node c: retrieval.corpus = '/c.jsonl': nothing is there: copy it there, to the same path"
    ]
    elsewhere = arranged(tmp_path, "a", "b", cluster__actors="[b]")
    assert [*elsewhere.problems_of(node("c"), [])] == []


def test_a_node_that_comes_is_compared_with_all_by_its_clock(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", cluster__actors="[b]")
    plan.add(node("b", 0.7))
    (said,) = plan.problems_of(node("c", -0.7), [])
    assert said.startswith("the clocks of node b (+0.70 s from the launcher's) and node c (-0.70")


def test_memory_for_what_lies_beside_actors_is_asked_for_too(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b")
    plan._seats._needs = {"retrieval_server": Need(0, 60 * GIB)}
    plan._seats.take("retrieval_server-b-1", "b")
    plan._seats.take("retrieval_server-b-2", "b")
    (said,) = (line for line in plan.problems([]) if "of memory are needed there" in line)
    assert said.startswith("node b: 12") and ", and 100.00 are free: " in said


def test_gpus_that_others_take_meanwhile_are_not_given(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", cluster__actors="[b]")
    plan._needs["actor"] = plan._seats._needs["actor"] = Need(1, 0)
    plan._seats.leave("actor-1")
    there = Node("b", "", 2, 4.0)
    plan.found["b"] = Surveyed(there, plan.found["b"].facts)
    plan._seats.add(Room(there, 1, GIB))  # actor-0 has the other
    plan.recount({"b": 1})
    with pytest.raises(NoRoom, match=r"left are b 0 \(other jobs hold 1 of 2\): end the other"):
        plan.seat("actor-1")
    plan.recount({"b": 0, "gone": 1})
    assert plan.seat("actor-1") == "b"


def test_threads_beyond_the_cores_are_told_and_not_refused(tmp_path: Path) -> None:
    plan = arranged(tmp_path, "a", "b", cluster__actors="[b]")
    assert not [line for line in [*plan.problems([]), *plan.table()] if "threads" in line]
    plan._seats.take("actor-2", "b")
    plan._seats.take("actor-3", "b")
    warned = [line for line in plan.table() if "threads" in line]
    assert warned == [
        "node b: the processes there have 5 threads, and 4 cores are there: they work, and slow "
        "each other down"
    ]


def test_the_table_says_who_lies_where_with_what_they_need(tmp_path: Path) -> None:
    lines = list(arranged(tmp_path, "a", "b").table())
    assert lines[0].startswith("node a: replay, learner") and "of 100.0 GiB" in lines[0]
    assert "actor-0" in lines[1]


def test_a_learner_without_a_node_has_the_first_room_and_keeps_nobody_else_waiting(
    tmp_path: Path,
) -> None:
    """Its node has died; the only other one that it may have is not back yet."""
    away = {"cluster__learner": "[b]", "cluster__actors": "[c]", "cluster__shared": tmp_path}
    plan = arranged(tmp_path, "a", "b", "c", **away)
    cluster = object.__new__(Cluster)  # its other parts need a cluster
    cluster.arrangement = plan
    plan.remove("b")
    plan.leave("actor-0")
    assert "cluster.learner" in cluster.room("actor-0")
    assert "actor-0" not in plan.seats, "nothing is booked for who cannot start"
    assert cluster.room("replay") == ""
    assert not any(word.startswith("weight_sync.endpoint") for word in plan.words("replay"))


def test_what_ray_has_not_got_is_refused_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = object.__new__(Cluster)  # its other parts need a cluster
    cluster.arrangement, cluster._seats, cluster._posts = SimpleNamespace(seats={}), {}, {}
    monkeypatch.setattr(module, "refusals", lambda *_: ["actor-0: Ray has no GPU left for it"])
    with pytest.raises(ConfigError, match=r"^actor-0: Ray has no GPU left for it$"):
        cluster._reserve()

"""Who lies on which node, and what is said where not all find room."""

from collections import Counter
from typing import Any

import pytest

from configs.load import ConfigError, load, parse
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts.fleet.kinds import kind_of
from scripts.fleet.nodes import Node
from scripts.fleet.placement import GIB, Need, NoRoom, Room, Seats, placed

HERE = "10.0.0.1"


def config_of(**fields: Any) -> Config:
    words = [f"{name.replace('__', '.')}={value}" for name, value in fields.items()]
    return parse("", ["cluster.address=auto", "retrieval.corpus=c.jsonl", *words], "a test")


def rooms_of(*gpus: int, gib: float = 100.0) -> list[Room]:
    nodes = [Node(f"10.0.0.{i}", f"n{i}", count, 8.0) for i, count in enumerate(gpus, 1)]
    return [Room(node, node.gpus, int(gib * GIB)) for node in nodes]


def needs_of(gpus: int = 0, workers: int = 1, gib: float = 1.0) -> dict[str, Need]:
    size = int(gib * GIB)
    each = {"replay": Need(0, size), "retrieval_server": Need(0, size)}
    return each | {"learner": Need(gpus, size), "actor": Need(gpus * workers, size)}


def by_node(seats: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, address in seats.items():
        found.setdefault(address[-1], []).append(name)
    return found


def test_actors_are_spread_evenly_and_first_away_from_the_learner() -> None:
    config = config_of(actors__count=4, cluster__retrieval_replicas=0)
    assert by_node(placed(config, rooms_of(0, 0, 0), needs_of(), HERE)) == {
        "1": ["replay", "learner", "actor-2", "retrieval_server"],
        "2": ["actor-0", "actor-3"],
        "3": ["actor-1"],
    }


def test_the_recipe_for_four_nodes_has_one_for_the_learner_and_three_for_actors() -> None:
    path = REPOSITORY / "configs" / "search_r1_7b_4x8.yaml"
    config = load(path, ["retrieval.corpus=c", "cluster.shared=/s", "run_dir=/s/run"])
    lie = by_node(placed(config, rooms_of(8, 8, 8, 8), needs_of(gpus=1), HERE))
    kinds = {at: Counter(kind_of(name) for name in names) for at, names in lie.items()}
    assert kinds.pop("1") == {"replay": 1, "learner": 8}
    assert kinds == {at: {"actor": 8, "retrieval_server": 1} for at in "234"}


def test_a_retrieval_server_lies_on_each_node_with_actors() -> None:
    config = config_of(actors__count=2)
    seats = placed(config, rooms_of(0, 0, 0), needs_of(), HERE)
    assert {n: at for n, at in seats.items() if n.startswith("retrieval")} == {
        "retrieval_server-10.0.0.2": "10.0.0.2",
        "retrieval_server-10.0.0.3": "10.0.0.3",
    }
    twice = config_of(actors__count=1, cluster__retrieval_replicas=2)
    assert by_node(placed(twice, rooms_of(0, 0), needs_of(), HERE))["2"] == [
        "actor-0",
        "retrieval_server-10.0.0.2-0",
        "retrieval_server-10.0.0.2-1",
    ]


def test_ranks_lie_on_as_few_nodes_as_hold_them() -> None:
    fields = {"learner__ranks": 4, "actors__count": 2, "cluster__shared": "/s"}
    seats = placed(config_of(**fields), rooms_of(2, 4, 8), needs_of(gpus=1), HERE)
    assert by_node(seats)["2"] == ["learner", "learner-1", "learner-2", "learner-3"]
    seats = placed(
        config_of(**fields | {"learner__ranks": 10}), rooms_of(2, 4, 8), needs_of(1), HERE
    )
    found = by_node(seats)
    assert [sum("learner" in n for n in found[node]) for node in "123"] == [2, 0, 8]


def test_engines_of_several_workers_have_whole_groups_of_gpus() -> None:
    config = config_of(actors__count=3, actors__tensor_parallel=2)
    seats = placed(config, rooms_of(1, 3, 4), needs_of(gpus=1, workers=2), HERE)
    assert [seats[f"actor-{i}"][-1] for i in range(3)] == ["3", "2", "3"]


def test_lists_say_where_ranks_and_actors_may_lie() -> None:
    config = config_of(
        actors__count=2, cluster__actors="[n3]", cluster__learner="10.0.0.2", cluster__shared="/s"
    )
    found = by_node(placed(config, rooms_of(0, 0, 0), needs_of(), HERE))
    assert found["2"] == ["learner"] and "actor-1" in found["3"] and found["1"] == ["replay"]


@pytest.mark.parametrize(
    ("fields", "gpus", "said"),
    [
        (
            {"actors__count": 4},
            (2, 1),
            r"actors.count = 4: each needs 1 GPU of its own; 2 find room, and left are 10.0.0.1 "
            r"\(n1\) 0, 10.0.0.2 \(n2\) 0: lower actors.count to 2, or let other nodes have some "
            r"\(cluster.actors\)",
        ),
        (
            {"learner__ranks": 3, "cluster__shared": "/s"},
            (1, 1),
            r"learner.ranks = 3: each needs 1 GPU of its own; 2 find room.*lower learner.ranks",
        ),
        ({"learner__ranks": 2}, (1, 9), "learner.ranks = 2.*: set cluster.shared, so that it may"),
        (
            {"cluster__actors": "[n7]"},
            (1, 1),
            r"cluster.actors = \['n7'\]: no such node is there: name some of 10.0.0.1 \(n1\), ",
        ),
    ],
)
def test_too_few_gpus_are_named(fields: Any, gpus: Any, said: str) -> None:
    with pytest.raises(NoRoom, match=f"^{said}"):
        placed(config_of(**fields), rooms_of(*gpus), needs_of(gpus=1), HERE)


def test_gpus_that_other_jobs_hold_are_no_room_and_are_named() -> None:
    rooms = rooms_of(0, 4, 4)
    node = Node("10.0.0.3", "n3", 4, 8.0, taken=3)
    taken = [*rooms[:2], Room(node, 1, rooms[2].memory_bytes)]
    config = config_of(actors__count=4, cluster__shared="/s")
    assert by_node(placed(config, taken, needs_of(gpus=1), HERE))["3"] == ["learner"]
    said = r"left are .*, 10.0.0.3 \(n3\) 0 \(other jobs hold 3 of 4\): end the other jobs that "
    with pytest.raises(NoRoom, match=said + r"hold some \(`ray status`\), or lower actors.count"):
        placed(config_of(actors__count=7, cluster__shared="/s"), taken, needs_of(gpus=1), HERE)


def test_too_little_memory_is_named() -> None:
    with pytest.raises(NoRoom, match=r"^actors.count = 5: each needs 2.00 GiB of memory; 2 find"):
        placed(config_of(actors__count=5), rooms_of(0, 0, gib=4.5), needs_of(gib=2.0), HERE)


def test_who_has_left_leaves_room_and_a_node_that_is_gone_leaves_none() -> None:
    config = config_of(actors__count=2, cluster__actors="[n2, n3]")
    seats = Seats(config, rooms_of(0, 1, 1), needs_of(gpus=1), HERE)
    assert [seats.seat("actor-0"), seats.seat("actor-1")] == ["10.0.0.2", "10.0.0.3"]
    seats.remove("10.0.0.3")
    with pytest.raises(NoRoom):
        seats.seat("actor-1")
    seats.leave("actor-0")
    assert seats.seat("actor-1") == "10.0.0.2"
    seats.add(rooms_of(0, 1, 1)[2])
    assert seats.seat("actor-0") == "10.0.0.3"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cluster.address=10.0.0.1", "cluster.address = '10.0.0.1' is no Ray cluster: give 'auto'"),
        ("cluster.address=ray://h:1", "cluster.address = 'ray://h:1' is no Ray cluster"),
        ("cluster.actors=[a]", r"cluster.actors = \('a',\) acts on nothing on this machine alone"),
    ],
)
def test_a_section_that_means_nothing_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse("", [override], "a test")

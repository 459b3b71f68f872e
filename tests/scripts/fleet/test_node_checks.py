"""What is said of a node that a run cannot lie on; storage and connections between nodes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.load import parse
from scripts.fleet import nodes
from scripts.fleet.node_checks import clocks_apart, gpu_lines, paths_of, problems
from scripts.fleet.nodes import Asked, Facts, Listeners, Node, Surveyed, look, unreachable
from scripts.setup.model_size import find_model

GIB = 1 << 30
CONFIG = parse(
    "",
    [
        "cluster.address=auto",
        "cluster.shared=/s",
        "run_dir=/s/run",
        "model.path=/m",
        "retrieval.corpus=/c.jsonl",
        "actors.tensor_parallel=2",
        "actors.threads=4",
    ],
    "a test",
)
FACTS = Facts(
    versions={"Python": "3.12.1", "vllm": "1.0", "forage": "1 (ab)"},
    python_path="/forage",
    sizes={"/m": 10, "/c.jsonl": 5},
    cores=8,
    memory_bytes=GIB,
    gpu_bytes=(80 * GIB, 80 * GIB),
    tmp_bytes=GIB,
    shm_bytes=GIB,
    ports=(20_000,),
    run_dir="",
    shared="",
)
SEATS = {"replay": "a", "learner": "a", "actor-0": "b", "retrieval_server-b": "b"}


def told(ahead_s: float = 0.0, doubt_s: float = 0.0, **facts: Any) -> list[str]:
    """What is said where `b` has these facts."""
    there = {name: Surveyed(Node(name, "", 2, 8.0), FACTS) for name in "ab"}
    changed = msgspec.structs.replace(FACTS, **facts)
    there["b"] = Surveyed(there["b"].node, changed, ahead_s, doubt_s)
    return list(problems(CONFIG, there, SEATS, "a", came={"a", "b"}))


def test_nodes_that_are_alike_are_good() -> None:
    assert told(ahead_s=1.4, doubt_s=0.5) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"cores": 2},
            "node b: actors.threads = 4: 2 cores are there: lower it, or let other nodes have it "
            "(cluster.learner, cluster.actors)",
        ),
        (
            {"versions": FACTS.versions | {"vllm": "0.9"}},
            "node b: vllm is 0.9 there and 1.0 here: install the same there",
        ),
        (
            {"versions": FACTS.versions | {"forage": "1 (cd)"}},
            "node b: forage is 1 (cd) there and 1 (ab) here: put the same there",
        ),
        (
            {"ahead_s": -2.25, "doubt_s": 0.1},
            "the clocks of node a (+0.00 s from the launcher's) and node b (-2.25 s) are 2.25 s "
            "apart, and 1 s are allowed: set both by NTP (timedatectl set-ntp true)",
        ),
        (
            {"sizes": {"/c.jsonl": 5}},
            "node b: model.path = '/m': nothing is there: copy it there, to the same path",
        ),
        (
            {"sizes": {"/c.jsonl": 4, "/m": 10}},
            "node b: retrieval.corpus = '/c.jsonl': 4 bytes there and 5 here: copy it there "
            "again, to the same path",
        ),
        (
            {"run_dir": "/ cannot be written (Read-only file system)"},
            "node b: run_dir = '/s/run': / cannot be written (Read-only file system): name one "
            "that all nodes can make",
        ),
        (
            {"shared": "another folder is there"},
            "node b: cluster.shared = '/s': another folder is there: mount the same storage "
            "there, or name a folder that all nodes see",
        ),
        (
            {"shm_bytes": GIB // 16},
            "node b: 0.06 GiB are free in /dev/shm, and 0.25 are needed: make room there",
        ),
        (
            {"gpu_bytes": (GIB,)},
            "node b: Ray was told of 2 GPUs, and the driver shows 1: start Ray there with "
            "--num-gpus=1, or see `forage doctor` there",
        ),
    ],
)
def test_each_problem_names_node_values_and_remedy(changed: Any, said: str) -> None:
    assert told(**changed) == [said]


def apart(**ahead_s: float) -> list[tuple[str, str, float]]:
    """The pairs of clocks that are said to be too far apart, each known to within 0.1 s."""
    found = [Surveyed(Node(at, "", 0, 8.0), FACTS, s, 0.1) for at, s in ahead_s.items()]
    said = clocks_apart(found)
    return [(one.node.address, other.node.address, round(s, 2)) for one, other, s in said]


def test_any_two_clocks_are_compared_each_with_its_doubt() -> None:
    assert apart() == apart(a=5.0) == apart(a=0.0, b=0.6, c=-0.6) == []
    assert apart(a=0.0, b=0.8, c=-0.8) == [("b", "c", 1.6)]


def test_each_clock_that_is_off_is_named_once() -> None:
    assert apart(a=0.0, b=0.1, c=7.0, d=-0.1, e=0.0) == [("c", "d", 7.1)]
    assert apart(a=0.0, b=0.1, c=7.0, d=-3.0, e=0.0) == [("c", "d", 10.0), ("b", "d", 3.1)]


def test_a_learner_away_from_the_launcher_needs_shared_storage() -> None:
    there = {name: Surveyed(Node(name, "", 2, 8.0), FACTS) for name in "ab"}
    seats = {"replay": "a", "learner": "b"}
    alone = msgspec.structs.replace(CONFIG.cluster, shared="")
    config = msgspec.structs.replace(CONFIG, cluster=alone)
    (said,) = problems(config, there, seats, "a")
    assert said.startswith("cluster.shared = '': the learner runs on b, and its checkpoints would")
    outside = msgspec.structs.replace(CONFIG, run_dir="/r")
    (said,) = problems(outside, there, seats, "a", "ab")
    assert said.startswith("run_dir = '/r' is outside cluster.shared = '/s': name a")


def test_a_gpu_that_is_too_small_is_told_by_node() -> None:
    there = {name: Surveyed(Node(name, "", 2, 8.0), FACTS) for name in "ab"}
    small = msgspec.structs.replace(FACTS, gpu_bytes=(8 * GIB,) * 2)
    there["b"] = Surveyed(there["b"].node, small)
    lines = list(gpu_lines(CONFIG, there, SEATS, find_model("Qwen2.5-7B")))
    assert [(line.split(":")[0], fits) for line, fits in lines] == [("a", False), ("b", False)]
    assert "a GPU: about" in lines[1][0] and "of 8.0 GiB: engine" in lines[1][0]


def test_each_kind_of_process_asks_for_its_files() -> None:
    assert paths_of(CONFIG, {"learner", "retrieval_server"}) == {
        "model.path": "/m",
        "retrieval.corpus": "/c.jsonl",
    }
    key = {"server": "https://192.0.2.7/mcp", "header": "X-Key", "file": "/k"}
    keyed = parse(str({"environment": {"mcp": [key["server"]], "mcp_keys": [key]}}), [], "here")
    assert paths_of(keyed, {"actor"}) == {"environment.mcp_keys[0].file": "/k"}


def test_a_node_finds_its_facts(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(7))
    paths = (str(tmp_path / "model"), str(tmp_path / "none"))
    with nodes.meeting_in(tmp_path) as meeting:
        asked = Asked(str(tmp_path / "run" / "x"), paths, str(meeting), ports=3)
        found = look(asked, "127.0.0.1")
        assert nodes.came(meeting, "127.0.0.1") and not nodes.came(meeting, "127.0.0.2")
    assert list(found.sizes.values()) == [7, None] and len(set(found.ports)) == 3
    assert (found.run_dir, found.shared) == ("", "") and found.versions["ray"]
    assert not any(tmp_path.glob(".forage*"))


def test_storage_that_is_not_the_launcher_s_is_told(tmp_path: Path) -> None:
    def told(meeting: Path) -> str:
        return look(Asked(str(tmp_path), (), str(meeting), 0), "127.0.0.1").shared

    assert told(tmp_path / "none") == "what the launcher wrote there is not there"
    with nodes.meeting_in(tmp_path) as meeting:
        (meeting / "launcher").write_text("another's")
        assert told(meeting) == "another folder is there"
    with nodes.meeting_in(tmp_path) as meeting:
        (meeting / "lock").unlink()
        (meeting / "lock").touch()  # as where locks stay on their node
        assert told(meeting).startswith("a lock that the launcher holds does not hold there")


def test_a_place_that_nobody_reaches_is_named() -> None:
    listeners = Listeners()
    (port,) = nodes.free_ports("127.0.0.1", 1)
    place = ("127.0.0.1", port)
    assert unreachable([place]) == {place: "Connection refused"}
    assert listeners.open(*place[:1], [port]) == [port]
    assert unreachable([place]) == {}
    listeners.close()

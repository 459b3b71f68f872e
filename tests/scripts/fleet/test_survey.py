"""Connections between nodes that are tried before a run lies on them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.load import ConfigError
from configs.schema import Config
from scripts.fleet import cluster
from scripts.fleet.cluster import Cluster
from scripts.fleet.examiner import Examiner
from scripts.fleet.host import FleetError
from scripts.fleet.nodes import Facts, Node, free_ports
from scripts.fleet.placement import NoRoom
from scripts.fleet.survey import survey, unmet, unreachable

CHOSEN = range(32_768, 65_536)  # by the system, or above what is fixed


class There:
    """A post whose outpost is in this process. From `dies_at`, a question, on it answers no more;
    a `wall` keeps it from connecting to ports.
    """

    def __init__(self, address: str, dies_at: str = "", wall: range = range(0)) -> None:
        self.node, self._outpost = Node(address, "", 0, 1.0), Examiner(address)
        self._dies_at, self._wall, self._dead = dies_at, wall, False

    def ask(self, method: str, *words: Any, deadline_s: float = 0.0) -> Any:
        self._dead = self._dead or method == self._dies_at
        if self._dead:
            raise FleetError(f"node {self.node.address}: the actor died")
        if method == "unreachable":
            walled = {place: "timed out" for place in words[0] if place[1] in self._wall}
            left = [place for place in words[0] if place not in walled]
            return walled | self._outpost.unreachable(left)
        if method == "look":
            ports = tuple(free_ports(self.node.address, 1))
            return Facts({}, "", {}, 1, 1 << 30, (), 1 << 30, 1 << 30, ports, "", "")
        return [] if method == "findings" else getattr(self._outpost, method)(*words)

    def clock(self) -> tuple[float, float]:
        return 0.0, 0.0

    def end(self) -> None:
        self._outpost.deafen()

    def close(self) -> None:
        self.end()


def test_what_is_listened_at_for_the_others_is_reached_and_closed_again() -> None:
    posts: list[Any] = [There("127.0.0.1"), There("127.0.0.2")]
    places = {"127.0.0.2": free_ports("127.0.0.2", 2)}
    for _ in range(2):
        assert [*unreachable(posts, places)] == []
    (port, _) = places["127.0.0.2"]
    refused = ("127.0.0.2", port), "Connection refused"
    assert [*posts[0].ask("unreachable", [refused[0]]).items()] == [refused]


def cluster_of(tmp_path: Path, *posts: Any) -> Cluster:
    """One that the launcher, on the first of these nodes, looks at; a post is closed by its end."""
    made: Any = object.__new__(Cluster)  # its other parts need a cluster
    made._given, made._here = Config(run_dir=str(tmp_path / "run")), posts[0].node.address
    made._posts, made._said = {post.node.address: post for post in posts}, []
    made._watch = SimpleNamespace(events=list)
    return made


@pytest.mark.parametrize("dies_at", ["clock", "look"])
def test_a_node_that_does_not_answer_is_passed_over_by_name(tmp_path: Path, dies_at: str) -> None:
    made = cluster_of(tmp_path, There("127.0.0.1"), There("127.0.0.2", dies_at))
    found, _, lost = made._surveyed()
    assert [*found] == [*made._posts] == ["127.0.0.1"]
    assert lost == ["node 127.0.0.2: the actor died"]
    said = "node 127.0.0.2: the actor died: it is passed over, until it answers"
    assert made.news() == [said] and made.news() == []


def test_the_launcher_s_own_node_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"node 127.0.0.1: the actor died$"):
        cluster_of(tmp_path, There("127.0.0.1", "look"), There("127.0.0.2"))._surveyed()


def test_a_run_that_needs_a_node_that_does_not_answer_is_refused_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = cluster_of(tmp_path, There("127.0.0.1"))
    silent, posts = There("127.0.0.2", "look"), dict(made._posts)
    posts[silent.node.address] = silent
    monkeypatch.setattr(cluster, "alive", lambda: [(each.node, "id") for each in posts.values()])
    monkeypatch.setattr(cluster, "Post", lambda node, _: posts[node.address])

    def no_room(_: Any) -> None:
        raise NoRoom("actors.count = 2: no room")

    made._arranged = no_room
    with pytest.raises(ConfigError, match=r"(?s)no room\nnode 127.0.0.2: the actor died: see that"):
        made.arrange()


def test_a_comer_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"node 127.0.0.2: the actor died"):
        survey(Config(run_dir=str(tmp_path)), [There("127.0.0.2", "look")])  # type: ignore[list-item]


def test_a_port_of_the_system_s_choice_that_is_not_reached_is_said_with_the_remedy() -> None:
    one, two, walled = There("127.0.0.1"), There("127.0.0.2"), There("127.0.0.3", wall=CHOSEN)
    posts: list[Any] = [one, two, walled]
    assert [*unmet(posts[:2])] == [*unmet(posts[:1])] == []
    to_one, to_two = unmet(posts)
    assert to_one.startswith("node 127.0.0.3: cannot connect to 127.0.0.1:")
    assert "to 127.0.0.2:" in to_two and "(timed out)" in to_two
    assert "over TCP, on all ports above 1023: weights and collectives" in to_two


def test_a_comer_and_the_others_try_each_other_alone() -> None:
    walled: list[Any] = [There("127.0.0.1", wall=CHOSEN), There("127.0.0.2", wall=CHOSEN)]
    comer: Any = There("127.0.0.3")
    said = [*unmet(walled, comer)]
    assert [line.partition(" cannot")[0] for line in said] == ["node 127.0.0.1:", "node 127.0.0.2:"]
    assert all("to 127.0.0.3:" in line for line in said)
    assert [*unmet([], comer)] == []

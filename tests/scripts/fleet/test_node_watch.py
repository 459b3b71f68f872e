"""What the launcher hears of nodes: who is gone, who is to go, who has come."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.fleet import node_watch
from scripts.fleet.host import FleetError
from scripts.fleet.node_watch import NodeEvent, NodeWatch
from scripts.fleet.nodes import Node

SOON_S = 10.0


class Post:
    """A node whose pulse is as it is told to be."""

    def __init__(self, address: str) -> None:
        self.node, self.node_id = Node(address, "", 0, 1.0), f"id-{address}"
        self.gone = self.leaving = self.ends = ""
        self.leaves_at = 0.0

    def feel(self) -> None:
        self.gone = self.ends


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A watch over `posts`; `comers`, `refused` and `leavers` are what its functions tell."""
    for name in ("LOOK_S", "PULSE_S", "NEWS_S"):
        monkeypatch.setattr(node_watch, name, 0.01)
    made = SimpleNamespace(posts={"a": Post("a")}, comers=[], refused="", leavers={}, inspected=0)
    made.failing = 0  # so many examinations, of a node that can be used

    def inspect(node: Node, node_id: str) -> tuple[Any, Any]:
        made.inspected += 1
        if made.refused or made.inspected <= made.failing:
            raise FleetError(made.refused or "the actor died unexpectedly")
        return Post(node.address), "facts"

    watch = NodeWatch(made.posts, lambda: made.comers, inspect, lambda: made.leavers)
    made.watch = watch
    watch.start()
    yield made
    watch.close()
    watch.close()
    assert not any(thread.is_alive() for thread in watch._threads)


def first(watched: SimpleNamespace, wanted: Callable[[NodeEvent], bool] = bool) -> NodeEvent:
    end = time.monotonic() + SOON_S
    while time.monotonic() < end:
        for event in watched.watch.events():
            if wanted(event):
                return event
        time.sleep(0.01)
    raise AssertionError("nothing is heard")


def silent(watched: SimpleNamespace) -> bool:
    time.sleep(0.1)
    return not list(watched.watch.events())


def test_a_node_that_is_gone_is_told_once(watched: SimpleNamespace) -> None:
    watched.posts["a"].ends = "node a is gone (no answer for 8 s)"
    event = first(watched)
    assert (event.said, event.post) == (watched.posts["a"].ends, watched.posts["a"])
    assert silent(watched)


def test_a_node_that_is_to_go_is_told_once_with_its_time(watched: SimpleNamespace) -> None:
    watched.leavers = at_s = {"id-a": time.time() + 60.0, "id-b": 0.0}
    event = first(watched)
    assert event.is_to_go and event.said in {f"node a is to go in {s} s" for s in (59, 60)}
    assert watched.posts["a"].leaving == "node a is to go", "how soon is said when it is asked"
    assert watched.posts["a"].leaves_at == at_s["id-a"]
    assert silent(watched)


def test_a_node_that_comes_is_told_with_its_facts(watched: SimpleNamespace) -> None:
    watched.comers = [(Node("b", "", 0, 1.0), "id-b")]
    event = first(watched)
    assert event.said == "node b has come" and event.surveyed == "facts"
    assert silent(watched) and watched.inspected == 1


def test_a_node_that_cannot_be_used_is_not_tried_all_the_time(watched: SimpleNamespace) -> None:
    watched.refused, watched.comers = "its clock is 7 s ahead", [(Node("b", "", 0, 1.0), "id-b")]
    event = first(watched)
    assert event.said == "node b has come and cannot be used: its clock is 7 s ahead"
    assert event.post is None and silent(watched) and watched.inspected == node_watch.TRIES


def test_an_examination_that_fails_is_made_again_before_it_is_told(
    watched: SimpleNamespace,
) -> None:
    watched.failing, watched.comers = node_watch.TRIES - 1, [(Node("b", "", 0, 1.0), "id-b")]
    event = first(watched)
    assert event.said == "node b has come" and event.surveyed == "facts"
    assert silent(watched) and watched.inspected == node_watch.TRIES


def test_a_head_that_is_away_for_a_while_ends_no_thread(watched: SimpleNamespace) -> None:
    class Away(dict[str, float]):
        def __contains__(self, _: object) -> bool:
            raise FleetError("no head")

    watched.leavers = Away()
    assert silent(watched)
    watched.leavers = {"id-a": 0.0}
    assert first(watched).said == "node a is to go"


def test_a_second_notice_counts_where_it_is_the_nearer_one() -> None:
    post, at_s = Post("a"), {"id-a": 1060.0}
    watch = NodeWatch({"a": post}, list, lambda *_: ("", ""), lambda: at_s)
    for told, known in ((1060.0, 1060.0), (1030.0, 1030.0), (1090.0, 1030.0), (0.0, 1030.0)):
        at_s["id-a"] = told
        watch._hear()
        assert post.leaves_at == known
    assert len(list(watch.events())) == 1

"""Seats as Ray holds them: reserved, refused, freed, and GPUs that others take."""

import subprocess
import sys
import tempfile

import pytest

SCRIPT = """
import os, secrets, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from scripts.fleet import arrangement, local_ray
with local_ray._without_unused():
    ray.init(num_cpus=1, num_gpus=3, include_dashboard=False, _temp_dir=sys.argv[1])
from scripts.fleet.cluster import Cluster
from scripts.fleet.ray_cluster import alive
from scripts.fleet.node_seat import NodeSeat, refusals
from tests.scripts.fleet.test_arrangement import arranged, node as surveyed
arrangement.on_cpu = lambda: False

def taken():
    return alive()[0][0].taken

def until(count):
    end = time.monotonic() + 20.0
    while taken() != count and time.monotonic() < end:
        time.sleep(0.05)
    print("taken", taken())

((there, node_id),) = alive()
post = SimpleNamespace(node=there, node_id=node_id, gone="", leaving="", laid=False, entrusted=())
one, two = NodeSeat(post, Path("."), 1), NodeSeat(post, Path("."), 3)
print("refused", *refusals({"actor-0": one, "actor-1": two}, 2.0))
until(1)
one.leave()
print("granted", two.granted(20.0), two.held)
two.leave()
until(0)

facts = surveyed(there.address).facts
cluster, plan = object.__new__(Cluster), arranged(
    Path(sys.argv[1]), there.address, found={there.address: arrangement.Surveyed(there, facts)}
)
cluster.arrangement, cluster._seats, cluster._posts = plan, {}, {there.address: post}
cluster._reserve()
until(3)
print("full", cluster.room("actor-2"))
cluster.leave("actor-1")
until(2)
other = placement_group([{"GPU": 1}])
other.wait(20.0)
until(3)
print("others", cluster.room("actor-2"))
remove_placement_group(other)
until(2)
print("room", repr(cluster.room("actor-2")), cluster._seats["actor-2"].held)

until(3)
cluster._given, cluster._here = plan.config, there.address  # another run, once that one has ended
found = {there.address: arrangement.Surveyed(alive()[0][0], facts)}
threading.Timer(0.2, lambda: [seat.leave() for seat in cluster._seats.values()]).start()
print("again", found[there.address].node.taken, cluster._arranged(found).gpus("learner"))
"""


@pytest.mark.slow
def test_ray_holds_seats_and_refuses_those_for_which_it_has_no_gpu() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets lie in it: a short path
        command = [sys.executable, "-c", SCRIPT, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line.partition(" ") for line in done.stdout.splitlines()]
    found = [(key, words) for key, _, words in said if key != "taken"]
    assert [words for key, _, words in said if key == "taken"] == list("1032323")
    (_, refused), granted, (_, full), (_, others), room, again = found
    assert refused.startswith("actor-1: Ray has no 3 GPUs left for it on node ")
    assert granted == ("granted", "True 3")
    assert "each needs 1 GPU of its own; 2 find room" in full and "other jobs" not in full
    assert "(other jobs hold 1 of 3): end the other jobs" in others
    assert room == ("room", "'' 1") and again == ("again", "3 1")

"""Runs that the launcher lays over the nodes of a Ray cluster: network namespaces, each with an
address and a Ray node of its own, on this machine.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import load
from configs.runtime.files import weights_bytes
from configs.runtime.process import Exit
from learner.checkpoint import newest
from replay.log.event_log import read
from replay.log.records import (
    ActorJoined,
    ActorLeft,
    Delivered,
    EvaluationFinished,
    LearnerResumed,
    Record,
    Reported,
)
from scripts.demo.task import DemoFiles
from tests.faults.hosts import Host, hosts, start_ray, supported
from tests.integration.placed import Launched
from tests.integration.test_cluster import (
    DRAIN_S,
    LONG,
    SHORT,
    START_S,
    check_books,
    check_drained,
    of,
    steps,
    wait_for_step,
)
from tests.integration.test_resume import relearned

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(bool(supported()), reason=f"no hosts: {supported()}"),
]
NOTICED_S, NOTICE_S = 10.0, 60
COMMAND_S = 90.0  # of one that connects to Ray
Launch = Callable[..., Launched]


@pytest.fixture
def launch(demo_files: DemoFiles, tmp_path: Path) -> Launch:
    """launch(host, address, *overrides): a run of the demo task, its launcher in this host."""

    def start(host: Host, address: str, *overrides: str) -> Launched:
        files = (
            f"model.path={demo_files.model}",
            f"questions.train={demo_files.train}",
            f"questions.eval={demo_files.eval}",
            f"retrieval.corpus={demo_files.corpus}",
        )
        return Launched(tmp_path / "run", host, address, (*files, *overrides))

    return start


def workers_in(host: Host) -> list[str]:
    """The modules of the run's processes in a host."""
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in host.pids()]
    modules = [line[2].decode() for line in lines if len(line) > 2 and line[1] == b"-m"]
    return sorted(module for module in modules if module.endswith(".worker"))


def words_in(host: Host, name: str) -> list[str]:
    """The words of the command of a process in a host that has this name."""
    lines = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in host.pids()]
    return next(line for line in lines if name in line)


def shown(host: Host) -> str:
    """The name of its node in what the launcher says."""
    return f"node {host.address} ({socket.gethostname()})"


def ray_ids(host: Host, address: str) -> dict[str, str]:
    """Ray's id of each living node of the cluster, by the node's address."""
    told = host.run(sys.executable, "-c", _IDS, address, timeout_s=COMMAND_S).splitlines()
    return dict(line.split()[1:] for line in told if line.startswith("node "))


_IDS = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
for each in ray.nodes():
    if each["Alive"]:
        print("node", each["NodeManagerAddress"], each["NodeID"])
"""


def secrets_in(host: Host) -> set[str] | None:
    """The names of the secrets that the launcher has laid there; None: no folder is there."""
    found = list(Path("/tmp").glob(f"forage-{os.getuid()}-*-{host.address}/keys"))
    return {path.name for folder in found for path in folder.iterdir()} if found else None


def give_notice(host: Host, address: str) -> None:
    """Say that this host will be taken away. Ray finds its node by itself where one is to find."""
    host.run(
        str(Path(sys.executable).with_name("ray")),
        "drain-node",
        f"--address={address}",
        f"--node-id={ray_ids(host, address)[host.address]}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=spot",
        f"--deadline-remaining-seconds={NOTICE_S}",
        timeout_s=COMMAND_S,
    )


def delivers(actor_id: str, after_s: float = 0.0) -> Callable[[Record], bool]:
    """True of a delivery by this actor later than then."""
    return lambda r: isinstance(r, Delivered) and r.actor_id == actor_id and r.now > after_s


def test_a_run_over_two_nodes_completes_and_leaves_the_cluster_as_it_was(launch: Launch) -> None:
    with hosts(2) as (one, two):
        address = start_ray([one, two])
        run = launch(one, address, "actors.count=1", *SHORT)
        run.wait_for("Delivered", delivers("actor-0"), START_S)
        assert workers_in(one) == ["learner.worker", "replay.worker"]
        assert workers_in(two) == ["actors.worker", "retrieval_server.worker"]
        assert secrets_in(two) == {"server.key", "actor.key_secret", "retrieval_token"}
        assert run.wait_for_end(START_S) == Exit.DONE
        assert workers_in(one) == workers_in(two) == []
        assert secrets_in(two) is None
        assert ray_ids(one, address).keys() == {one.address, two.address}
    check_books(run)
    assert f"node {one.address}" in run.said() and f"node {two.address}" in run.said()
    assert [each.result.step for each in of(run, EvaluationFinished)] == [0, 3]


def learner_on(first: Host, then: Host, actors: Host, shared: Path) -> tuple[str, ...]:
    """Overrides of a long run: where its learner lies, where it may move to, and its one actor."""
    return (
        *LONG,
        "actors.count=1",
        f"cluster.learner=[{first.address},{then.address}]",
        f"cluster.actors=[{actors.address}]",
        f"cluster.shared={shared}",
    )


@pytest.mark.soak("hosts")
@pytest.mark.timeout(1800)
def test_the_demo_learns_over_three_nodes_and_sends_each_version_to_each_once(
    launch: Launch, tmp_path: Path
) -> None:
    with hosts(3) as (one, two, three):
        address = start_ray([one, two, three])
        before = one.traffic().sent
        run = launch(
            one,
            address,
            "actors.count=2",
            f"cluster.actors=[{two.address},{three.address}]",
            f"cluster.learner=[{one.address}]",
            f"cluster.shared={tmp_path}",
            "learner.ranks=2",
            "learner.zero_stage=3",
            "actors.rollouts_in_flight=128",
        )
        assert run.wait_for_end(1700.0) == Exit.DONE
        sent = one.traffic().sent - before
    check_books(run)
    weights = weights_bytes(load(run.run_dir / "config.yaml").model.path)
    reported = [each.gauges.get("sync/sent_bytes", 0.0) for each in of(run, Reported)]
    (*_, last) = of(run, EvaluationFinished)
    print(f"EM {last.result.em:.3f}; to 2 nodes {sent / weights:.1f} times the weights")
    assert last.result.em >= 0.9
    assert 1.9 * weights < max(reported) <= 2 * weights
    assert sent < 1.5 * 2 * weights * (1 + len(reported))  # leases, logs and Ray beside them


@pytest.mark.soak("hosts")
@pytest.mark.timeout(1000)
def test_a_node_that_dies_is_missed_in_time_and_used_again(launch: Launch) -> None:
    with hosts(3) as (one, two, three):
        address = start_ray([one, two, three])
        run = launch(one, address, "actors.count=2", *LONG)
        wait_for_step(run, 3)
        at_s, done = time.time(), steps(run)
        three.die()
        run.wait_for_words(f"{shown(three)} is gone", 60.0)
        noticed_s = time.time() - at_s
        left = run.wait_for(
            "ActorLeft", lambda r: isinstance(r, ActorLeft) and r.actor_id == "actor-1", 60.0
        )
        run.wait_for("actor-1 elsewhere", delivers("actor-1", left.now), START_S)
        wait_for_step(run, done + 4)
        assert workers_in(three) == []
        three.mend()
        back_s = time.time()
        start_ray([three], head=one)
        run.wait_for_words(f"there is room now for retrieval_server-{three.address}", START_S)
        # The other node with actors goes: what lay there finds room on the one that is back.
        two.die()
        run.wait_for_words(f"{shown(two)} is gone", 60.0)
        again = run.wait_for("actor-0 elsewhere", delivers("actor-0", time.time()), START_S)
        assert "actors.worker" in workers_in(three)
        assert run.end(DRAIN_S) == Exit.INTERRUPTED
    print(
        f"noticed after {noticed_s:.1f} s; used again {again.now - back_s:.1f} s after its return"
    )
    assert noticed_s < NOTICED_S and "raylet" not in run.said()
    check_books(run)


@pytest.mark.soak("hosts")
@pytest.mark.timeout(1000)
def test_actors_that_find_no_room_start_on_a_node_that_comes(launch: Launch) -> None:
    with hosts(3) as (one, two, three):
        address = start_ray([one, two])
        actors = f"cluster.actors=[{two.address},{three.address}]"
        run = launch(one, address, "actors.count=1", actors, *LONG)
        run.wait_for("Delivered", delivers("actor-0"), START_S)
        give_notice(two, address)
        run.wait_for_words("actor-0 works on there for now: no other node has room", NOTICED_S)
        run.wait_for_words("actor-0 waits for room: cluster.actors = ", NOTICE_S)
        one.run(sys.executable, "-m", "scripts.cli", "scale", str(run.run_dir), "2")
        run.wait_for_words("2 actors wanted: actor-0 waits, actor-1 waits", COMMAND_S)
        start_ray([three], head=one)
        run.wait_for_words("there is room now for actor-0, actor-1", START_S)
        run.wait_for("Delivered of actor-1", delivers("actor-1"), START_S)
        urls = [word for word in words_in(three, "actor-1") if word.startswith("retrieval.url=")]
        assert [url.startswith(f"retrieval.url=[http://{three.address}:") for url in urls] == [True]
        one.run(sys.executable, "-m", "scripts.cli", "scale", str(run.run_dir), "1")
        run.wait_for_words("actor-1 has left", DRAIN_S)
        assert run.end(DRAIN_S) == Exit.INTERRUPTED
        assert secrets_in(three) is None
    check_books(run)


@pytest.mark.soak("hosts")
@pytest.mark.timeout(1000)
def test_a_node_that_is_to_go_drains_without_a_lost_lease(launch: Launch) -> None:
    with hosts(3) as (one, two, three):
        address = start_ray([one, two, three])
        run = launch(one, address, "actors.count=2", *LONG)
        run.wait_for("Delivered of actor-1", delivers("actor-1"), START_S)
        wait_for_step(run, 2)
        at_s = time.time()
        give_notice(three, address)
        left = run.wait_for(
            "ActorLeft", lambda r: isinstance(r, ActorLeft) and r.actor_id == "actor-1", NOTICE_S
        )
        assert left.cause == "goodbye"
        three.die()
        run.wait_for("actor-1 elsewhere", delivers("actor-1", left.now), START_S)
        wait_for_step(run, steps(run) + 4)
        assert run.end(DRAIN_S) == Exit.INTERRUPTED
        run.go_on(f"learner.total_steps={steps(run) + 3}")  # on the nodes that are left
        assert run.wait_for_end(START_S) == Exit.DONE, run.said()[-2000:]
    print(f"drained {left.now - at_s:.1f} s after the notice")
    check_drained(run, "actor-1", until_s=left.now)
    check_books(run)


@pytest.mark.soak("hosts")
@pytest.mark.timeout(1000)
def test_a_learner_whose_node_is_to_go_saves_and_trains_nothing_again(
    launch: Launch, tmp_path: Path
) -> None:
    with hosts(3) as (one, two, three):
        address = start_ray([one, two, three])
        may_move = learner_on(two, one, three, tmp_path)
        run = launch(one, address, *may_move, "learner.checkpoint_every=1000")
        wait_for_step(run, 2)
        assert "learner.worker" in workers_in(two)
        at_s = time.time()
        give_notice(two, address)
        again = run.wait_for(
            "LearnerResumed", lambda r: isinstance(r, LearnerResumed) and r.step > 0, START_S
        )
        assert "learner.worker" in workers_in(one) and workers_in(two) == []
        two.die()
        wait_for_step(run, again.step + 3)
        assert run.end(DRAIN_S) == Exit.INTERRUPTED
    print(f"the learner had moved {again.now - at_s:.1f} s after the notice, after {again.step}")
    assert f"the learner saves and moves: {shown(two)} is to go in " in run.said()
    done = [each.step for each in of(run, Reported)]
    assert done == list(range(1, len(done) + 1)), "each step is trained once"
    assert len(list(of(run, LearnerResumed))) == 2
    check_books(run)


@pytest.mark.soak("hosts")
@pytest.mark.timeout(1500)
def test_the_learner_s_node_dies_and_it_goes_on_elsewhere_to_the_same_losses(
    launch: Launch, tmp_path: Path
) -> None:
    with hosts(3) as (one, two, three):
        address = start_ray([one, two, three])
        saves = ("learner.total_steps=14", "learner.checkpoint_every=3")
        run = launch(one, address, *learner_on(two, one, three, tmp_path), *saves)
        wait_for_step(run, 5)
        assert "learner.worker" in workers_in(two)
        two.die()
        saved = newest(run.run_dir)
        assert saved is not None and saved.manifest.step >= 3
        assert run.wait_for_end(START_S) == Exit.DONE
    check_books(run)
    records = list(read(run.run_dir / "events.log"))
    losses = {r.step: r.gauges["learner/loss"] for r in records if isinstance(r, Reported)}
    assert sorted(losses) == list(range(1, 15))
    assert len([each for each in records if isinstance(each, LearnerResumed)]) >= 2
    assert len([each for each in records if isinstance(each, ActorJoined)]) >= 2
    assert relearned(run.run_dir, records) == losses

"""Runs over several hosts: network namespaces, each with an address of its own, on this machine."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from configs.load import load
from configs.runtime.files import weights_bytes
from learner.checkpoint import newest
from replay.log.event_log import read
from replay.log.records import (
    ActorJoined,
    ActorLeft,
    Delivered,
    EvaluationFinished,
    Leased,
    LeaseReturned,
    Record,
    Reported,
    Superseded,
)
from scripts.demo.task import DemoFiles
from scripts.runs.books import Audit
from tests.faults.hosts import Host, hosts, supported
from tests.integration.placed import OverHosts, Placed
from tests.integration.test_resume import relearned

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(bool(supported()), reason=f"no hosts: {supported()}"),
]

SHORT = (
    "learner.total_steps=3",
    "learner.eval_every=3",
    "learner.checkpoint_every=3",
    "questions.eval_limit=8",
    "replay.groups_per_step=2",
)
LONG = (
    "learner.total_steps=2000",
    "learner.eval_every=1000",
    "learner.checkpoint_every=4",
    "questions.eval_limit=8",
    "replay.groups_per_step=4",
    "actors.rollouts_in_flight=64",
    "actors.max_num_seqs=64",
)
START_S, STEP_S, DRAIN_S = 300.0, 120.0, 120.0
Kind = TypeVar("Kind", bound=Record)


@pytest.fixture
def place(demo_files: DemoFiles, tmp_path: Path) -> Callable[..., Placed]:
    """place(where, *overrides): a run of the demo task whose processes lie in these hosts."""

    def start(where: dict[str, Host], *overrides: str) -> Placed:
        count = sum(name.startswith("actor-") for name in where)
        files = (
            f"model.path={demo_files.model}",
            f"questions.train={demo_files.train}",
            f"questions.eval={demo_files.eval}",
            f"retrieval.corpus={demo_files.corpus}",
            f"actors.count={count}",
        )
        return Placed(tmp_path / "run", where, (*files, *overrides))

    return start


def on(services: Host, learner: Host, *actors: Host) -> dict[str, Host]:
    """Which process lies where."""
    actor_hosts = {f"actor-{index}": host for index, host in enumerate(actors)}
    return {"retrieval_server": services, "replay": services, "learner": learner} | actor_hosts


def of(run: OverHosts, kind: type[Kind]) -> Iterator[Kind]:
    """The records of a kind."""
    return (each for each in run.records() if isinstance(each, kind))


def steps(run: OverHosts) -> int:
    """The last step that the learner has reported."""
    return max((each.step for each in of(run, Reported)), default=0)


def wait_for_step(run: OverHosts, step: int, dead: tuple[str, ...] = ()) -> None:
    """Wait until the learner has reported a step."""
    run.wait_for(
        f"report of step {step}",
        lambda record: isinstance(record, Reported) and record.step >= step,
        START_S if step < 5 else STEP_S,
        dead,
    )


def check_books(run: OverHosts) -> None:
    """Every lease, trajectory and group is accounted for."""
    books = Audit()
    books.fold(run.run_dir / "events.log")
    assert books.faults == [] and books.committed > 0


def check_drained(run: OverHosts, name: str, until_s: float = math.inf) -> None:
    """By then it had delivered all that it had begun; the rest its goodbye gave to others."""
    records = [each for each in run.records() if getattr(each, "actor_id", "") == name]
    own = [each for each in records if each.now <= until_s]
    given = [(e.group_id, sibling) for e in own if isinstance(e, Leased) for sibling in e.siblings]
    delivered = [(e.group_id, e.sibling) for e in own if isinstance(e, Delivered | Superseded)]
    back = [e for e in own if isinstance(e, LeaseReturned)]
    assert {each.cause for each in [*back, *(e for e in own if isinstance(e, ActorLeft))]} == {
        "goodbye"
    }
    assert delivered and sorted(given) == sorted(
        [*delivered, *((e.group_id, e.sibling) for e in back)]
    )
    others = {
        (e.group_id, e.sibling) for e in of(run, Delivered) if e.actor_id != name or e.now > until_s
    }
    opened_last = max(group_id for group_id, _ in others)
    assert {(e.group_id, e.sibling) for e in back if e.group_id <= opened_last - 16} <= others


@pytest.mark.soak("hosts")
@pytest.mark.timeout(600)
def test_a_run_over_two_hosts_completes_and_leaves_nothing(place: Callable[..., Placed]) -> None:
    with hosts(2) as (one, two):
        before = two.traffic()
        run = place(on(one, one, two), *SHORT)
        run.wait_for("Delivered", lambda record: isinstance(record, Delivered), START_S)
        assert run.processes["actor-0"].pid in two.pids()
        assert run.processes["learner"].pid in one.pids()
        run.finish(START_S, ["actor-0"])
        received = two.traffic().received - before.received
        assert one.pids() == two.pids() == []
    check_books(run)
    ended = [(r.result.step, r.result.newest_version) for r in of(run, EvaluationFinished)]
    assert ended == [(0, 0), (3, 3)] and list(of(run, LeaseReturned)) == []
    weights = weights_bytes(load(run.run_dir / "config.yaml").model.path)
    assert 2 * weights < received < 4 * weights + 1_000_000  # versions 0 to 3, and the questions


@pytest.mark.soak("hosts")
@pytest.mark.timeout(1000)
def test_a_host_that_dies_is_missed_in_time_and_used_again(place: Callable[..., Placed]) -> None:
    with hosts(3) as (one, two, three):
        run = place(on(one, one, two, three), *LONG)
        wait_for_step(run, 3)
        at_s, done = time.time(), steps(run)
        three.die()
        left = run.wait_for(
            "ActorLeft",
            lambda record: isinstance(record, ActorLeft) and record.actor_id == "actor-1",
            60.0,
            dead=("actor-1",),
        )
        wait_for_step(run, done + 4, dead=("actor-1",))
        three.mend()
        back_s = time.time()
        run.start("actor-1", three)

        def delivers(record: Record) -> bool:
            own = isinstance(record, Delivered) and record.actor_id == "actor-1"
            return own and record.now > back_s

        again = run.wait_for("Delivered of the actor that is back", delivers, START_S)
        wait_for_step(run, steps(run) + 2)
        run.processes["learner"].send_signal(signal.SIGTERM)
        run.finish(DRAIN_S, ["actor-0", "actor-1"])
    print(f"missed after {left.now - at_s:.1f} s; delivered {again.now - back_s:.1f} s after")
    assert left.now - at_s < load(run.run_dir / "config.yaml").replay.dead_after_s + 2.0
    assert len([r for r in of(run, ActorJoined) if r.actor_id == "actor-1"]) == 2
    downloaded = max(each.gauges.get("sync/downloads", 0.0) for each in of(run, Reported))
    assert downloaded >= 1.0, "when it is back it downloads a version, and the others go on"
    check_books(run)


@pytest.mark.soak("hosts")
@pytest.mark.timeout(1500)
def test_the_learners_host_dies_and_comes_back_to_the_same_losses(
    place: Callable[..., Placed],
) -> None:
    with hosts(3) as (one, two, three):
        settings = (*LONG, "learner.total_steps=14", "learner.checkpoint_every=3")
        run = place(on(one, two, three), *settings)
        wait_for_step(run, 5)
        two.die()
        saved = newest(run.run_dir)
        assert saved is not None and saved.manifest.step >= 3
        two.mend()
        run.start("learner", two, "--resume")
        run.finish(START_S, ["actor-0"])
    check_books(run)
    records = list(read(run.run_dir / "events.log"))
    losses = {r.step: r.gauges["learner/loss"] for r in records if isinstance(r, Reported)}
    assert sorted(losses) == list(range(1, 15))
    assert relearned(run.run_dir, records) == losses

"""What is said when a deadline passes."""

from replay.protocol import Status, StepReport
from scripts.fleet.wait_graph import wait_graph

NAMES = ("retrieval_server", "replay", "learner", "actor-0", "actor-1", "actor-2")


def test_each_process_has_its_line() -> None:
    phase = "step 8: 3 of 4 groups ready; oldest unfinished: group 12 on actor-0"
    fleet = {"actor-0": {"sync/policy_version": 7.0, "actor/rollouts_in_flight": 9.0}}
    gauges = {"replay/ready_groups": 3.0, "replay/open_groups": 5.0}
    status = Status((StepReport(7, {}),), (), gauges, fleet, phase, "")
    states = {"actor-1": "is stopped (SIGSTOP) since 12 s"}
    assert wait_graph(status, 4.2, NAMES, states) == [
        "retrieval_server: works, as far as the launcher sees",
        "replay: 3 groups ready, 5 open (4 s ago)",
        f"learner: reported step 7 last; {phase} (4 s ago)",
        "actor-0: serves version 7, 9 rollouts in flight (4 s ago)",
        "actor-1: is stopped (SIGSTOP) since 12 s",
        "actor-2: not known to replay (4 s ago)",
    ]


def test_before_replay_has_told_anything() -> None:
    assert wait_graph(None, 0.0, ["learner"], {}) == ["learner: replay has not told yet"]

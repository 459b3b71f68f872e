"""The stream's benchmark at a tiny size: what it delivers is real, and all of it is on record."""

import json
from pathlib import Path

import pytest

from replay.codec import decode_trajectory, encode_trajectory
from replay.protocol import Lease
from replay.trajectory import Question, Sampling
from scripts import cli
from scripts.bench.harness import RunFailed
from scripts.bench.stream import bench
from scripts.bench.stream.rollouts import TOKENS, Template, rollout
from scripts.bench.stream.run import Row, run_row
from scripts.runs.books import Audit


def test_a_template_is_what_the_codec_makes() -> None:
    sampling = Sampling(0.9, 7)
    lease = Lease(70_000, 5, "train", Question("q-" + "9" * 40, "what?", ("x",)), sampling)
    expected = rollout(70_000, 5, lease.question.id, "actor-999", 300, sampling)
    payload = Template(300, sampling).payload(lease, "actor-999")
    assert payload == encode_trajectory(expected)
    assert len(decode_trajectory(payload).sequences[0].tokens) == TOKENS == 2048


@pytest.mark.timeout(90)
@pytest.mark.slow
@pytest.mark.parametrize("row", [Row(3, 3.0, 0.1), Row(8, 3.0, 0.0, every_s=0.2)])
def test_all_that_is_acknowledged_is_in_the_log(row: Row, tmp_path: Path) -> None:
    found = run_row(row, tmp_path)
    audit = Audit()
    audit.fold(tmp_path / "events.log")
    assert audit.faults == [] and not audit.torn
    assert found["acknowledged"].keys() == {"accepted"}
    assert audit.summary()["deliveries"]["accepted"] == found["acknowledged"]["accepted"] > 0
    assert found["heartbeat_p99_s"] > 0
    assert found["trajectories_per_s"] > 0 and found["ack_p99_s"] >= found["ack_p50_s"] > 0


def test_a_server_that_ends_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"server ended with 7: .*no such thing"):
        run_row(Row(1, 0.1, 0.0), tmp_path, ("-c", "print('no such thing'); exit(7)"))


@pytest.mark.timeout(90)
def test_the_figures_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"trajectories_per_s": 10.0, "ack_p50_s": 0.1, "ack_p99_s": 0.2, "mb_per_s": 1.0}
    row |= {"per_server_cpu_s": 20.0, "peak_rss_bytes": 1, "heartbeat_p99_s": 0.05}
    cpu = {"server": 0.5, "learner": 0.1, "actors": 0.1}
    monkeypatch.setattr(
        bench,
        "run_row",
        lambda r, _: row | {"peers": r.peers, "every_s": r.every_s, "cpu": cpu},
    )
    queue = [{"producers": 1, "under_way": 1, "trajectories_per_s": 2.0}]
    monkeypatch.setattr(bench, "ray_queue", lambda *_: queue)
    back = {"rollouts": 1, "records": 2, "log_bytes": 3, "peak_rss_bytes": 4}
    restarts = [back | {"restart_s": 2.0}, back | {"restart_s": 2.2}]
    restarts.append(back | {"restart_s": 2.4, "peak_rss_bytes": 6})
    monkeypatch.setattr(bench, "measure_restarts", lambda *_: restarts)
    assert cli.main(["bench", "stream", "--quick", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["restart_s_at_1m"] == 2.2 and round(found["restart_ratio"], 6) == 1.2
    assert found["restart_memory_ratio"] == 1.5 and found["heartbeat_p99_s_at_1000"] == 0.05
    assert found["over_ray_queue"] == 5.0 and found["ack_p99_s_at_1000"] == 0.2
    assert found["trajectories_per_s"] == 10.0 and found["peak_rss_bytes"] == 1
    assert [r["peers"] for r in found["rows"]] == [1, 16, 256, 1000, 1000]


def test_without_ray_there_is_a_message(capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    def cannot(*_: object) -> None:
        raise bench.NoRay("the Ray baseline ended with 3: the port is taken")

    monkeypatch.setattr(bench, "ray_queue", cannot)
    assert cli.main(["bench", "stream", "--quick"]) == 1
    assert "the port is taken" in capfd.readouterr().err
